"""Hosts of a Ray cluster in the plan of `up`: choice of their devices, placement of ranks, and checks of each host."""
