"""Owns a deployment's processes, logs, run directory and admin socket. Exists before the weights and after a crash. No torch."""
