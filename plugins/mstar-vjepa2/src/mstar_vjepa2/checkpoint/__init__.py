"""Checkpoint configs, files, tensor names and weight loading."""
