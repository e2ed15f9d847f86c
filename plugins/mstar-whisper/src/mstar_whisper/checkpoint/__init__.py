"""Checkpoint files: sizes, token ids and the shipped miniature."""
