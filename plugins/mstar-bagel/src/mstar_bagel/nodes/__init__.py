"""Modules of the nodes. Imported by workers only."""
