"""A host of fake deployments with a memory ledger, and a clock that tests move. For the gateway's fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from mstar_core.errors import MstarError, StartError, StateConflict
from mstar_core.gateway.fleet.head import DeploymentHead
from mstar_core.gateway.fleet.hosting import Need
from mstar_core.gateway.fleet.managed import ManagedFleet
from mstar_core.gateway.parts import Replica
from mstar_core.gateway.serve_file import ModelEntry
from mstar_core.host.gpu_locks import Holder, MemoryClaim

TOTAL = 100
RESIDUE = 2
"""Bytes that a sleeping deployment keeps."""


class MovedClock:
    """A clock that stands until `advance`."""

    def __init__(self) -> None:
        self.time = 0.0
        self._waits: list[tuple[float, asyncio.Event]] = []

    def now(self) -> float:
        return self.time

    async def wait(self, event: asyncio.Event, limit_s: float | None = None) -> None:
        if limit_s is None:
            await event.wait()
            return
        due = asyncio.Event()
        entry = (self.time + limit_s, due)
        self._waits.append(entry)
        tasks = [asyncio.ensure_future(each.wait()) for each in (event, due)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            if entry in self._waits:
                self._waits.remove(entry)

    async def advance(self, seconds: float, step: float = 1.0) -> None:
        """Move the time in steps, and let everything that is due run."""
        end = self.time + seconds
        await settle()
        while self.time < end:
            self.time = min(end, self.time + step)
            for at, due in list(self._waits):
                if at <= self.time:
                    due.set()
            await settle()


class Staged(Protocol):
    """A fleet with what a scene needs of it."""

    @property
    def fleet(self) -> ManagedFleet: ...


S = TypeVar("S", bound=Staged)


def run_scene(make: Callable[[], S], play: Callable[[S], Any]) -> S:
    """Run a scene and close the fleet."""

    async def run() -> S:
        stage = make()
        await stage.fleet.start()
        try:
            async with asyncio.timeout(250):
                await play(stage)
        finally:
            await stage.fleet.close(is_final=False)
        return stage

    return asyncio.run(run())


async def settle() -> None:
    """Let the tasks of the loop run until they wait."""
    for _ in range(80):
        await asyncio.sleep(0)


@dataclass
class FakeDeployment:
    """One deployment. held: bytes by key. running: requests of clients that are not the fleet's.

    owner: token of the gateway that has started it, empty for an operator. level: of its sleep.
    """

    name: str
    need: Need
    state: str = "starting"
    running: int = 0
    waiting: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    held: dict[str, int] = field(default_factory=dict)
    owner: str = ""
    level: int = 0
    sleep_copies: bool = False


class FakeLaunch:
    """A start that waits for `FakeHost.finish`."""

    def __init__(self, host: FakeHost, name: str, error: MstarError | None) -> None:
        self._host, self._name, self._error = host, name, error
        self.done = asyncio.Event()

    async def until_placed(self) -> None:
        if self._error is not None and self._error.code != "late":
            raise self._error

    async def until_ready(self) -> None:
        await self.done.wait()
        if self._error is not None:
            self._host.deployments.pop(self._name, None)
            raise self._error
        self._host.deployments[self._name].state = "ready"


@dataclass
class FakeHost:
    """Deployments and their ledger. needs: bytes by model and key. log: of what the fleet did, in order.

    is_slow: starts end only at `finish`. refuses_sleep: names whose sleep is refused. unplaced: models whose plan says
    that they cannot sleep. may_wake: wakes end only once it is set. looks: readings of the ledger. failures: errors of
    next starts. entries: of the last launches.
    """

    needs: Mapping[str, Mapping[str, int]]
    is_slow: bool = False
    deployments: dict[str, FakeDeployment] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    failures: dict[str, list[MstarError]] = field(default_factory=dict)
    launches: dict[str, FakeLaunch] = field(default_factory=dict)
    entries: dict[str, ModelEntry] = field(default_factory=dict)
    cannot_sleep: set[str] = field(default_factory=set)
    may_wake: asyncio.Event | None = None
    unplaced: set[str] = field(default_factory=set)
    is_shared: bool = True
    woken_by_others: set[str] = field(default_factory=set)
    free_memory: int = 1000

    fault: MstarError | None = None
    looks: int = 0

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def host_memory(self) -> int:
        return self.free_memory

    async def survey(self, entry: ModelEntry) -> Need:
        claims = {
            key: MemoryClaim(device=f"cuda:{key}", need_bytes=size, total_bytes=TOTAL)
            for key, size in self.needs[entry.name].items()
        }
        for claim in claims.values():
            if claim.need_bytes > TOTAL:
                raise StartError(f"{entry.name} can never fit on GPU 0", "1 byte too few", code="gpu_memory_never")
        budget = "auto" if self.is_shared and claims else ""
        return Need(claims=claims, budget=budget, can_sleep=entry.name not in self.unplaced)

    async def launch(
        self, entry: ModelEntry, name: str, need: Need, owner: str, *, is_replacement: bool = False
    ) -> FakeLaunch:
        self.log.append(f"{'replace' if is_replacement else 'start'} {name}")
        self.entries[name] = entry
        left = self.failures.get(name, [])
        error = left.pop(0) if left else None
        if is_replacement:
            launch = self.launches[name] = FakeLaunch(self, name, error)
            launch.done.set()
            if error is None:
                self.deployments[name].owner = owner
            return launch
        if error is None or error.code == "late":
            copies = bool(entry.set.get("sleep_copies"))
            deployment = FakeDeployment(name, need, owner=owner, sleep_copies=copies)
            self._take(deployment, {key: claim.need_bytes for key, claim in need.claims.items()})
            self.deployments[name] = deployment
        launch = self.launches[name] = FakeLaunch(self, name, error)
        if not self.is_slow:
            launch.done.set()
        return launch

    def finish(self, name: str) -> None:
        """Let a start end."""
        self.launches[name].done.set()

    def adopt(self, name: str, model: str, state: str = "ready") -> FakeDeployment:
        """Add a deployment that another process started."""
        claims = {
            key: MemoryClaim(device=f"cuda:{key}", need_bytes=size, total_bytes=TOTAL)
            for key, size in self.needs[model].items()
        }
        deployment = FakeDeployment(name, Need(claims=claims, budget="auto"), state=state)
        self._take(deployment, {key: claim.need_bytes for key, claim in claims.items()})
        self.deployments[name] = deployment
        return deployment

    async def heads(self, names: Sequence[str]) -> Mapping[str, tuple[Replica, DeploymentHead | None]]:
        if self.fault is not None:
            return {}
        found = {name: self.deployments[name] for name in names if name in self.deployments}
        return {
            name: (
                Replica(model=name, deployment=name, url=f"http://{name}"),
                DeploymentHead(
                    state=each.state,
                    running=each.running,
                    waiting=each.waiting,
                    phase=each.phase,
                    done=each.done,
                    total=each.total,
                    owner=each.owner,
                    sleep_level=each.level,
                    sleep_copies=each.sleep_copies,
                    weights_bytes=each.need.claims_bytes,
                ),
            )
            for name, each in found.items()
        }

    async def sleep(self, name: str, level: int) -> None:
        deployment = self.deployments[name]
        if deployment.running:
            raise StateConflict(f"{name} has running requests")
        if name in self.cannot_sleep:
            raise MstarError(f"{name} cannot sleep")
        self.log.append(f"sleep {name}" if level == 1 else f"sleep {name} at level {level}")
        deployment.state, deployment.level = "sleeping", level
        deployment.held = dict.fromkeys(deployment.held, RESIDUE)

    async def wake(self, name: str) -> None:
        deployment = self.deployments[name]
        if name in self.woken_by_others:
            self.woken_by_others.discard(name)
            deployment.state = "ready"
            raise StateConflict("a wake is in progress", code="in_progress")
        self._take(deployment, {key: claim.need_bytes for key, claim in deployment.need.claims.items()})
        self.log.append(f"wake {name}")
        if self.may_wake is not None:
            await self.may_wake.wait()
        deployment.state, deployment.phase, deployment.level = "ready", "", 0

    async def end(self, name: str) -> None:
        self.log.append(f"end {name}")
        self.deployments.pop(name, None)

    def holders(self, key: str) -> Sequence[Holder]:
        self.looks += 1
        return [Holder(pid=1, name=d.name, held_bytes=d.held[key]) for d in self.deployments.values() if key in d.held]

    def used(self, key: str) -> int:
        """Bytes of a device that are held."""
        return sum(holder.held_bytes or 0 for holder in self.holders(key))

    def _take(self, deployment: FakeDeployment, sizes: Mapping[str, int]) -> None:
        for key, size in sizes.items():
            others = sum(d.held.get(key, 0) for d in self.deployments.values() if d.name != deployment.name)
            if others + size > TOTAL:
                raise StartError("too little memory", code="gpu_memory_short")
        deployment.held = dict(sizes)
