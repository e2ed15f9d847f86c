"""Checks of a declared graph. Every problem is reported with its place and the nearest name."""
