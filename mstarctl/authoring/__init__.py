"""Files that mstarctl writes for authors: new plugins and commented configurations."""
