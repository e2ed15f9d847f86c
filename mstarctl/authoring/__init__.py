"""Help for authors of plugins and configurations: scaffold, checks, commented files and explanations."""
