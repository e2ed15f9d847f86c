"""The config.json of a checkpoint. Standard library only."""
