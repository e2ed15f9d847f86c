"""Layouts: pure functions from a view to lines of exact width. No Textual, clock or sockets."""
