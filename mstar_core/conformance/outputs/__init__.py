"""Checks of what nodes and models return: by their declared ports, and by a reference."""
