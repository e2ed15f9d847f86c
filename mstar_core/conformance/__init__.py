"""Checks that serve a miniature: the whole path of a request in one process, and what a plugin must keep on it."""
