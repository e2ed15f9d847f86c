"""Soak: mixed families under load while processes are killed; run as `python -m bench.soak`."""
