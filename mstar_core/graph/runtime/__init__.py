"""State machine of one run of a walk on one rank, driven by the worker."""
