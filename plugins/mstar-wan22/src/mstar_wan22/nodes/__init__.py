"""Modules of the nodes."""
