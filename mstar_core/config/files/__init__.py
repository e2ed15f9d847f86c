"""Reading of deployment files: YAML with lines, checks against the keys and a model, placement on ranks."""
