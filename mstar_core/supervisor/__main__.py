"""Entry point of the supervisor process, started by `mstarctl up`."""

from __future__ import annotations

from mstar_core.supervisor.main import main

main()
