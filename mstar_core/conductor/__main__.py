"""Runs the conductor's process; started by the supervisor."""

from __future__ import annotations

from mstar_core.conductor.main import main

main()
