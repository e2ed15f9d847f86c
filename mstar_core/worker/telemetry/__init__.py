"""Telemetry of a worker: spans of requests, counts of steps and edges, and their report."""
