"""Output of a load test: live display, tables and plots."""
