"""Telemetry: watch frames and their store, hub, request log, filters, metrics. No torch, no sockets."""
