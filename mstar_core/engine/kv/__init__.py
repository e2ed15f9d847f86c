"""Engine for nodes with a paged KV cache."""
