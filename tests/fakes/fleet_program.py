"""A fleet of fake deployments in a process of its own, which tests kill. Arguments: a folder of state, and models.

It brings each model up in turn and prints a line before and after, until it is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

from mstar_core.gateway.fleet.clock import MonotonicClock
from mstar_core.gateway.fleet.hosts.hosts import FleetHosts
from mstar_core.gateway.fleet.local_host import LocalHost
from mstar_core.gateway.fleet.managed import ManagedFleet
from mstar_core.gateway.fleet.owned import owner_token
from mstar_core.gateway.fleet.running import RunningFleet
from mstar_core.gateway.serve_file import ModelEntry, ServeFile

UP = (sys.executable, "-m", "tests.fakes.fleet_up")


def fake_fleet(state: Path, models: list[str]) -> ManagedFleet:
    """Return a fleet that starts fake deployments."""
    entries = {name: ModelEntry(name=name, target=name, memory_text="1GiB") for name in models}
    serve = ServeFile(models=entries, discover=False)
    return ManagedFleet(
        serve, FleetHosts(lambda name: LocalHost(UP)), MonotonicClock(), RunningFleet(serve), owner_token(state)
    )


async def main() -> None:
    """Use one model after the other."""
    state, *models = sys.argv[1:]
    fleet = fake_fleet(Path(state), models)
    await fleet.start()
    for name in itertools.cycle(models):
        print(f"wants {name}", flush=True)
        (replica,) = await fleet.ready(name, lambda progress: None)
        with fleet.using(replica):
            print(f"has {name}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
