"""Screens as pure functions: what a view knows, in; lines of exact width, out. No textual, clock or sockets."""
