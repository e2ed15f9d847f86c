"""Placer on Ray: the room of a deployment is one placement group per host. Used by the supervisor."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

import msgspec

from mstar_core.cluster.calls import NextAgent, ReleaseCall, ReplaceCall, StartCall, call_ray
from mstar_core.cluster.owner import this_process
from mstar_core.cluster.placer import AgentOrder, Bundle, StartedAgent
from mstar_core.errors import MstarError

log = logging.getLogger(__name__)

WAIT_S: Final = 60.0
"""Time that one call waits for room. A call costs a second of processor time."""

PAUSE_S: Final = 5.0


class RayPlacer:
    """Reserves room in a Ray cluster and starts agents. Owned by the supervisor.

    Groups are detached: they outlive the calls, and the next start of this deployment removes those of a dead owner.
    """

    def __init__(self, address: str, deployment: str) -> None:
        self.address = address
        self._deployment = deployment
        self._owner = this_process()
        self._incarnations: Counter[str] = Counter()

    async def start(self, bundles: tuple[Bundle, ...], order: AgentOrder) -> tuple[StartedAgent, ...]:
        """Reserve all bundles and start an agent in each but the local one. Raises StartError and Unreachable."""
        for bundle in bundles:
            self._incarnations[bundle.host] = 1
        order = msgspec.structs.replace(order, incarnation=1)
        call = StartCall(address=self.address, owner=self._owner, bundles=bundles, order=order)
        return await call_ray(call, tuple[StartedAgent, ...])

    async def replace(self, bundle: Bundle, order: AgentOrder) -> StartedAgent:
        """Start the next agent for a bundle, on its host or on another. Waits for room. Raises as `start`."""
        self._incarnations[bundle.host] += 1
        order = msgspec.structs.replace(order, incarnation=self._incarnations[bundle.host])
        call = ReplaceCall(address=self.address, owner=self._owner, bundle=bundle, order=order, wait_s=WAIT_S)
        while True:
            found = await call_ray(call, NextAgent)
            if found.agent is not None:
                return found.agent
            log.info("host %s: %s", bundle.host, found.waits_for)
            await asyncio.sleep(PAUSE_S)

    async def release(self, hosts: tuple[str, ...] = (), *, when: asyncio.Event | None = None) -> None:
        """Give back the room of these hosts, of all without names. A failure is logged. when: see `Placer`."""
        call = ReleaseCall(address=self.address, owner=self._owner, deployment=self._deployment, hosts=hosts)
        try:
            await call_ray(call, type(None), when=when)
        except MstarError as error:
            log.warning("room on Ray's hosts stays reserved until the next start: %s", error)
