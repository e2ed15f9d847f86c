"""Checks of a model spec when it is loaded: its parts, and a dry run of its programs."""
