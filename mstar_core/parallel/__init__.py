"""Tensor parallelism: process groups, collectives, sharding rules and plans of a leader to its followers."""
