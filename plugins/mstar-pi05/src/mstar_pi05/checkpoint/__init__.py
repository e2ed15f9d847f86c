"""Checkpoint configs, tensor names, weights and download."""
