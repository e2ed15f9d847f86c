"""Runs a worker's process; started by the supervisor."""

from __future__ import annotations

from mstar_core.worker.main import main

main()
