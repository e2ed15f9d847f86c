"""Figures of a run, computed from its records: metrics, statistics, terms, verdicts, and shares of server time."""
