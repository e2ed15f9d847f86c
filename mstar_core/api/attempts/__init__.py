"""Attempts of a request: its record, limits, and the manager that sends it again after the death of a process."""
