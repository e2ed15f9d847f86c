"""Supervisor of a deployment: owns its processes, logs, run directory and admin socket. No torch."""
