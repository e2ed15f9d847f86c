"""Checkpoint files: layout, download, and the generated tiny checkpoint."""
