"""Checkpoint: sizes and ids of the official files, weights of each node, the trained miniature."""
