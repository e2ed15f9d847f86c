"""Groups of ranks that compute one node together, and loading of their shards."""
