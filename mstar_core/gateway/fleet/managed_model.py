"""One model of the fleet with its deployments. Owned by ManagedFleet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from mstar_core.errors import MstarError
from mstar_core.gateway.fleet.head import DeploymentHead
from mstar_core.gateway.fleet.hosting import Need
from mstar_core.gateway.fleet.hosts.names import host_of, qualified
from mstar_core.gateway.parts import LoadProgress, ModelState, Replica, ReplicaPlace
from mstar_core.gateway.serve_file import ModelEntry
from mstar_core.gateway.serve_values import KeepKind
from mstar_core.host.other_hosts.contexts import LOCAL

TURN_S: Final = 10.0
"""Longest stay of a model that others wait for: then it takes no new requests and makes room, unless it is pinned."""

CALM_S: Final = 2.0
"""Time without a request after which a model that has just come makes room."""

GUESS_S: Final = 30.0
"""Time of a load or wake before one was measured."""

LOST: Final = "lost"
"""State of a deployment whose host cannot be reached, beside those of a model."""

WEIGHT: Final = 0.5
"""Weight of the newest measurement in the mean."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One deployment of a model. level: of its sleep. running: requests of this gateway; reported: of other
    clients, as of the last head.

    last_used: time of the last request. woken_at: of the last load or wake, which took came_s with its wait for room.
    rest: bytes by key of the ledger that it kept in its last sleep. slept_s, wake_s: time of its last sleep and wake,
    without waits for room. moves: sleeps and wakes so far. kept_until: it was handed out to `handed` requests that
    have not begun yet, or has just become able to serve those that wait.
    is_moving: it is put to sleep or ended. is_own: this gateway, or one before it, started the deployment. is_lost: its
    host cannot be reached; the deployment may run there.
    """

    name: str
    replica: Replica | None = None
    head: DeploymentHead | None = None
    state: ModelState = ModelState.ABSENT
    level: int = 0
    running: int = 0
    reported: int = 0
    last_used: float = 0.0
    woken_at: float = float("-inf")
    came_s: float = 0.0
    rest: Mapping[str, int] = field(default_factory=dict)
    slept_s: float = 0.0
    wake_s: float = 0.0
    moves: int = 0
    kept_until: float = 0.0
    handed: int = 0
    is_moving: bool = False
    is_own: bool = False
    is_lost: bool = False

    @property
    def host(self) -> str:
        """Host of the deployment."""
        return host_of(self.name)

    @property
    def is_copied(self) -> bool:
        """Whether it sleeps, or falls asleep, with its weights on the host."""
        return (self.state is ModelState.SLEEPING or self.is_moving) and self.level == 1

    @property
    def is_awake(self) -> bool:
        """Whether it takes requests."""
        return self.state in (ModelState.READY, ModelState.IDLE) and not self.is_moving and self.replica is not None

    def is_busy(self, now: float) -> bool:
        """Whether requests run on it, or are about to."""
        return self.running > 0 or self.reported > 0 or now < self.kept_until

    def worth(self, now: float) -> float:
        """Return the time that its sleep and next wake take over that since its last request: the least makes room."""
        return max(1.0, self.slept_s + self.wake_s) / max(1e-3, now - self.last_used)

    def is_free(self, now: float) -> bool:
        """Whether it may make room at once.

        One that has just come stays for as long as that took, if requests follow each other: else models that do not
        fit together would move for most of the time, and each would serve one request.
        """
        stays = now - self.woken_at < min(TURN_S, self.came_s) and now - self.last_used < CALM_S
        return not stays and not self.is_busy(now)


@dataclass(slots=True, kw_only=True)
class Failure:
    """Why a model cannot serve. until: time of the next attempt. count: of attempts that failed in turn."""

    error: MstarError
    until: float
    count: int


@dataclass(slots=True, kw_only=True)
class ManagedModel:
    """A model and its members. queued: requests that wait for it. task: brings it up. is_yielding: it takes no new
    requests until it has made room for another model. waits_for: text of what a request waits for.
    needs: memory of a deployment by host. owed: deployments that served on hosts that were lost, to be started again.
    """

    entry: ModelEntry
    members: list[Member] = field(default_factory=list)
    needs: dict[str, Need] = field(default_factory=dict)
    owed: int = 0
    failure: Failure | None = None
    queued: int = 0
    loads: int = 0
    wakes: int = 0
    load_s: float = 0.0
    wake_s: float = 0.0
    began: float = 0.0
    task: asyncio.Task[None] | None = None
    is_yielding: bool = False
    waits_for: str = ""
    busy_since: float | None = None
    calm_since: float | None = None
    scaled_at: float = 0.0

    @property
    def name(self) -> str:
        """Name for clients."""
        return self.entry.name

    @property
    def is_pinned(self) -> bool:
        """Whether it never sleeps."""
        return self.entry.keep.kind is KeepKind.ALWAYS

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts on which its deployments may run, the preferred first."""
        return self.entry.hosts or (LOCAL,)

    @property
    def need(self) -> Need | None:
        """Memory of a deployment on the first host for which it is known."""
        return next(iter(self.needs.values()), None)

    def ends(self, member: Member) -> bool:
        """Return whether only the end of a deployment gives its memory back."""
        need = self.needs.get(member.host)
        return need is not None and need.ends

    @property
    def can_sleep(self) -> bool | None:
        """Whether it can sleep: as planned, else as its entry says; None if that is not known yet."""
        if self.needs:
            return all(need.can_sleep for need in self.needs.values())
        return True if self.entry.device == "cpu" else self.entry.sleepable or None

    @property
    def awake(self) -> list[Member]:
        """The deployments that take requests."""
        return [member for member in self.members if member.is_awake]

    @property
    def running(self) -> int:
        """Requests of this gateway that run on it."""
        return sum(member.running for member in self.members)

    @property
    def sleep_level(self) -> int:
        """Level of its sleep, 0 if it does not sleep."""
        levels = (member.level for member in self.members if member.state is ModelState.SLEEPING)
        return max(levels, default=0) if self.state is ModelState.SLEEPING else 0

    @property
    def last_used(self) -> float:
        """Time of its last request."""
        return max((member.last_used for member in self.members), default=0.0)

    @property
    def state(self) -> ModelState:
        """State for clients and operators."""
        if self.awake:
            return ModelState.READY if self.running or any(m.reported for m in self.awake) else ModelState.IDLE
        states = {member.state for member in self.members if not member.is_moving}
        if self.task is not None or ModelState.LOADING in states:
            return ModelState.LOADING
        if self.failure is not None:
            return ModelState.FAILED
        moving = any(member.is_moving for member in self.members)
        return ModelState.SLEEPING if moving or ModelState.SLEEPING in states else ModelState.ABSENT

    def names(self) -> Iterator[str]:
        """Yield the names of its deployments, host by host: the model's, then with a number."""
        for host in self.hosts:
            yield from self.names_on(host)

    def names_on(self, host: str) -> Iterator[str]:
        """Yield the names of its deployments on one host."""
        for number in range(1, self.entry.replicas.most + 1):
            yield qualified(host, member_name(self.name, number))

    def places(self) -> tuple[ReplicaPlace, ...]:
        """Return the hosts of its deployments."""
        shown = [member for member in self.members if member.is_lost or member.state is not ModelState.ABSENT]
        return tuple(
            ReplicaPlace(deployment=each.name, host=each.host, state=LOST if each.is_lost else str(each.state))
            for each in shown
        )

    def member(self, name: str) -> Member:
        """Return the deployment called `name`, which is added if it is new."""
        for member in self.members:
            if member.name == name:
                return member
        self.members.append(Member(name=name))
        return self.members[-1]

    def measured(self, took_s: float, *, is_wake: bool) -> None:
        """Count a load or a wake."""
        if is_wake:
            self.wakes += 1
            self.wake_s = _mean(self.wake_s, took_s)
        else:
            self.loads += 1
            self.load_s = _mean(self.load_s, took_s)

    def expected_s(self) -> float:
        """Return the time of the next load or wake, from those that were measured."""
        is_asleep = any(member.state is ModelState.SLEEPING for member in self.members)
        return (self.wake_s if is_asleep else self.load_s) or self.load_s or self.wake_s or GUESS_S

    def left_s(self, now: float) -> float:
        """Return the time until it serves, at least one second."""
        return max(1.0, self.expected_s() - (now - self.began if self.task is not None else 0.0))

    def progress(self) -> LoadProgress:
        """Return the progress of the deployment that is nearest to serve."""
        heads = [m.head for m in self.members if m.head is not None and m.head.is_coming]
        if heads and not self.waits_for:
            return heads[0].progress
        return LoadProgress(state=self.state, text=self.waits_for or f"{self.name} is {self.state}")


def member_name(model: str, number: int) -> str:
    """Return the name of a model's deployment. number: from 1."""
    return model if number == 1 else f"{model}-{number}"


def _mean(before: float, now: float) -> float:
    return now if not before else (1 - WEIGHT) * before + WEIGHT * now
