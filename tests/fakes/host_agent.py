"""`mstarctl serve agent` for fake deployments: `python -m tests.fakes.host_agent`."""

from __future__ import annotations

from mstar_core.gateway.fleet.hosts.agent_main import run_agent
from mstar_core.gateway.fleet.local_host import LocalHost
from tests.fakes.fleet_program import UP

if __name__ == "__main__":
    run_agent(LocalHost(UP))
