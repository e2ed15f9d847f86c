"""The real supervisor with agents on this machine as other hosts, and short pauses between restarts.

Started by `Spread` as `python -m tests.hosts.supervisor SPEC`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from mstar_core.cluster.placer import AgentOrder, Bundle, Placer, StartedAgent
from mstar_core.config.deployment import DeploymentSpec
from mstar_core.supervisor.child import Pace
from mstar_core.supervisor.main import main
from tests.fakes.placer import ProcessPlacer

SILENCE: Final = "HOST_SILENCE_S"
"""Environment variable: silence of a host after which it is lost."""

NO_ROOM: Final = "no_room"
"""File in the runtime folder: while it exists, no host has room for another agent."""


class Machine(ProcessPlacer):
    """This machine as all hosts of a deployment."""

    def __init__(self, spec: DeploymentSpec) -> None:
        super().__init__({host.name: {"PYTHONPATH": os.environ["PYTHONPATH"]} for host in spec.hosts})
        self.addresses = {host.name: host.address for host in spec.hosts}
        self._mark = Path(os.environ["MSTAR_RUNTIME_DIR"]) / NO_ROOM

    async def replace(self, bundle: Bundle, order: AgentOrder) -> StartedAgent:
        """See `Placer.replace`."""
        self.full = "a test has taken it" if self._mark.exists() else ""
        return await super().replace(bundle, order)


def machine(spec: DeploymentSpec) -> Placer:
    """Return the placer of a deployment."""
    return Machine(spec)


if __name__ == "__main__":
    main(
        pace=Pace(
            backoff_s=(0.05,),
            restarts_max=1_000_000,
            publish_s=0.05,
            host_silence_s=float(os.environ[SILENCE]),
            host_retry_s=(0.2,),
        ),
        placer=machine,
    )
