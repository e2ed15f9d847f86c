"""Load of replicas: the gateway's own requests, and those of others by the deployments' telemetry."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from mstar_core.gateway.fleet.head import read_head
from mstar_core.gateway.fleet.hosts.names import admin_socket_of
from mstar_core.gateway.parts import Fleet, Replica

POLL_S: Final = 1.0
ANSWER: Final = aiohttp.ClientTimeout(total=2.0)
_GAUGE: Final = re.compile(rb"^mstar_(?:inflight|queue_depth)(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)


@dataclass(slots=True)
class Loads:
    """Requests by deployment. Owned by the door.

    own: that this gateway has sent. others: that the telemetry shows beyond them, as of the last poll.
    """

    session: aiohttp.ClientSession
    own: Counter[str] = field(default_factory=Counter)
    others: dict[str, float] = field(default_factory=dict)

    def of(self, replicas: Sequence[Replica]) -> Mapping[str, float]:
        """Return the load of replicas by their deployments."""
        return {each.deployment: self.own[each.deployment] + self.others.get(each.deployment, 0) for each in replicas}

    async def follow(self, fleet: Fleet) -> None:
        """Poll the deployments between which there is a choice, until cancelled."""
        while True:
            shared = [each for status in fleet.models() if len(status.replicas) > 1 for each in status.replicas]
            counts = await asyncio.gather(*(self._requests(each) for each in shared))
            self.others = {
                each.deployment: max(0.0, count - self.own[each.deployment])
                for each, count in zip(shared, counts, strict=True)
            }
            await asyncio.sleep(POLL_S)

    async def _requests(self, replica: Replica) -> float:
        """Return the requests of a deployment, running and waiting; 0 if it does not say."""
        if replica.is_local:
            head = await read_head(admin_socket_of(replica.deployment))
            return 0.0 if head is None else float(head.running + head.waiting)
        headers = {} if replica.key is None else {"Authorization": f"Bearer {replica.key}"}
        try:
            async with self.session.get(f"{replica.url}/metrics", headers=headers, timeout=ANSWER) as response:
                text = await response.read() if response.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError, OSError):
            return 0.0
        return sum(float(value) for value in _GAUGE.findall(text))
