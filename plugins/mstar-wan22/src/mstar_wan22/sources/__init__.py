"""Sources of a checkpoint: the official download, and files with random weights."""
