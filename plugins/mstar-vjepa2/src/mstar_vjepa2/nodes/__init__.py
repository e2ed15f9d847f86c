"""Modules behind the graph's nodes, and their layers. Run by the engines; need torch."""
