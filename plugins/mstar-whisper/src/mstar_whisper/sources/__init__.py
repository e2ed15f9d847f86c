"""Checkpoint files: the generated tiny checkpoint, and the official weights."""
