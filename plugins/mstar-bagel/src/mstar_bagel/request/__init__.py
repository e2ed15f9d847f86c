"""Preparation of a request: tokens, images, segments and flow times. Imports no torch."""
