"""Checkpoint files: finding, downloading, reading, and copying to the device."""
