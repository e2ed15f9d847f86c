"""Hosts of a Ray cluster: what they offer, and where agents run. Only `ray_program` imports Ray."""
