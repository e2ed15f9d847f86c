"""Owns a deployment's processes, logs, run directory and admin socket, before and after everything else. No torch."""
