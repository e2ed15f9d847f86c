"""HTTP client of a load test, in processes of its own, and the decoding of what it received."""
