"""Files of a checkpoint: sizes, download, weights, and the generated tiny checkpoint."""
