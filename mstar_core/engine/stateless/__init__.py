"""Engine for nodes that keep no state between calls."""
