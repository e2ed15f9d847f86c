"""Flat, resolved form of walks, and how a placement cuts it into one share per rank."""
