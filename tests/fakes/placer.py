"""Placer that starts agents as processes of this machine, each under the name of another host."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from mstar_core.cluster.placer import AgentOrder, Bundle, StartedAgent
from mstar_core.errors import StartError

ROOT = Path(__file__).resolve().parents[2]


class ProcessPlacer:
    """Offers any number of hosts. Its owner calls `close`.

    environments: of the agents, by host. started: agents by host, the newest last. full: why no host has room, empty
    if there is room. versions: that the next agents claim. gpus: indices that a host offers. addresses: of hosts,
    127.0.0.1 for others. released: it was called.
    """

    def __init__(self, environments: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.environments = {host: dict(values) for host, values in (environments or {}).items()}
        self.started: dict[str, list[StartedAgent]] = {}
        self.gpus: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.full = ""
        self.asked = 0
        self.released = False

    async def start(self, bundles: tuple[Bundle, ...], order: AgentOrder) -> tuple[StartedAgent, ...]:
        """See `Placer.start`."""
        local = StartedAgent(host="", address="127.0.0.1", endpoint="", key="", pid=0, incarnation=1)
        return tuple([await self._agent(each, order) if each.host else local for each in bundles])

    async def replace(self, bundle: Bundle, order: AgentOrder) -> StartedAgent:
        """See `Placer.replace`."""
        self.asked += 1
        return await self._agent(bundle, order)

    async def release(self, hosts: tuple[str, ...] = (), *, when: asyncio.Event | None = None) -> None:
        """See `Placer.release`."""
        if when is not None:
            await when.wait()
        self.released = True

    async def _agent(self, bundle: Bundle, order: AgentOrder) -> StartedAgent:
        if self.full:
            raise StartError("no host of the cluster has room", self.full, "add a host", phase="plan")
        known = self.started.setdefault(bundle.host, [])
        order = msgspec.structs.replace(order, host=bundle.host, incarnation=len(known) + 1)
        order = msgspec.structs.replace(order, address=self.addresses.get(bundle.host, order.address))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.environments.get(bundle.host, {})}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mstar_core.agent", "--detach"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            cwd="/",
        )
        try:
            line, _ = await process.communicate(msgspec.json.encode(order))
        except asyncio.CancelledError:
            process.kill()
            await process.communicate()
            raise
        assert process.returncode == 0, "the agent did not start"
        agent = msgspec.json.decode(line, type=StartedAgent)
        agent = msgspec.structs.replace(
            agent, gpus=self.gpus.get(bundle.host, ()), versions={**agent.versions, **self.versions}, title=bundle.host
        )
        known.append(agent)
        return agent

    def signal(self, host: str, number: signal.Signals, incarnation: int = 0) -> None:
        """Send a signal to an agent: SIGKILL loses the host, because its processes die with it. 0: the newest."""
        with suppress(ProcessLookupError):
            os.kill(self.started[host][incarnation - 1].pid, number)

    def is_alive(self, host: str, incarnation: int) -> bool:
        """Whether an agent still runs."""
        return exists(self.started[host][incarnation - 1].pid)

    def close(self) -> None:
        """Kill the agents that are left."""
        for host, agents in self.started.items():
            for number in range(len(agents)):
                self.signal(host, signal.SIGKILL, number + 1)


def exists(pid: int | None) -> bool:
    """Whether a process runs. One that init has not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
