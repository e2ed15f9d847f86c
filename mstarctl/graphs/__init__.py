"""Drawings and exports of a model's graph: text, dot and JSON."""
