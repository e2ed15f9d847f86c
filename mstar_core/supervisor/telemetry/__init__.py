"""Telemetry of a deployment: readings of the host, the published state, and metric samples made from them."""
