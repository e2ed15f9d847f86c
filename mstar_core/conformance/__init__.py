"""Conformance checks of plugins, and the in-process runtime that serves a miniature for them."""
