"""Computes the nodes of one rank: the KV engine, the stateless engine, and what they are made of."""
