"""Load test: draws requests, sends them on time, measures what clients see, and compares runs."""
