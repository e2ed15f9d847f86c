"""Readings of this host: loads, processes and GPUs."""
