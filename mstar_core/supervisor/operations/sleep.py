"""Sleep and wake of a deployment, or of some of its nodes. Owned by the supervisor.

Asleep, its processes live and its ranks give the memory of their devices back. A whole deployment sleeps behind a pause
of the api, so that new requests wait; nodes sleep while requests that do not need them go on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import MstarError, NotFound, StateConflict, TimedOut, Unavailable, UsageError, did_you_mean
from mstar_core.messages.names import process_rank
from mstar_core.messages.sleep import Sleep, SleepDone, SleepProgress, Wake
from mstar_core.messages.wire import Message
from mstar_core.supervisor.operations.answers import Answers
from mstar_core.supervisor.operations.rolling import ANSWER_S

if TYPE_CHECKING:
    from mstar_core.supervisor.child import Child
    from mstar_core.supervisor.events import Events
    from mstar_core.supervisor.operations.changes import Changes
    from mstar_core.supervisor.operations.operations import Operations

ASLEEP: Final = "sleeping"
LEVELS: Final = (1, 2)
SHOWN: Final = 5
"""Requests that a refusal names."""

REFUSAL_S: Final = 0.5
"""Time in which the processes report requests that prevent a sleep. One that has just ended prevents none."""

CALLER_S: Final = 3.0
"""Longest wait of a caller for a refusal, which comes late on a busy host. A sleep that goes well may last longer."""

WAKE_HINT: Final = "mstarctl wake {name}"


class MemoryLedger(Protocol):
    """Account of the memory of devices that deployments share. Devices: `cuda:0` of the supervisor's host."""

    def give_back(self, freed: Mapping[str, int], *, is_whole: bool) -> None:
        """Give bytes of devices back, which the ranks do not use any more. is_whole: the whole deployment sleeps."""

    def take_again(self, needed: Mapping[str, int], *, is_whole: bool) -> None:
        """Take all these bytes of devices or none. Raises StartError that names the deployments that hold them."""


class NoLedger:
    """Account of a deployment that holds its devices alone."""

    def give_back(self, freed: Mapping[str, int], *, is_whole: bool) -> None:
        """Keep the devices."""

    def take_again(self, needed: Mapping[str, int], *, is_whole: bool) -> None:
        """Find the devices as they were."""


class SleepableDeployment(Protocol):
    """The parts of the supervisor that sleep and wake use."""

    spec: DeploymentSpec
    state: str
    reason: str
    children: dict[str, Child]
    changes: Changes
    events: Events

    def pause(self) -> Callable[[], bool]:
        """Make new requests wait. Returns a function that tells whether no request runs any more."""

    def unpause(self) -> None:
        """Let waiting requests go on."""

    def running_requests(self) -> Sequence[str]:
        """Return the client ids of requests that have not ended."""

    def fall_asleep(self, reason: str) -> None:
        """Enter the state `sleeping`."""

    def wake_up(self) -> None:
        """Leave the state `sleeping`: ready, or degraded until all processes are ready."""

    def respawn(self, names: Collection[str]) -> None:
        """Start processes that have died while the deployment slept."""


@dataclass(slots=True)
class RankAsleep:
    """Nodes of a rank that sleep, by level. is_whole: all do. freed: bytes of its device. kept: of host memory."""

    nodes: dict[str, int] = field(default_factory=dict)
    freed: int = 0
    kept: int = 0
    is_whole: bool = False


class Sleeping:
    """The sleep of a deployment. send: a message to a child.

    ranks: of processes with nodes that sleep, by name. is_whole: whether the whole deployment sleeps. lost: processes
    that died meanwhile; they are started by the wake. wakes: number of wakes. slept_at, woke_at: seconds since the
    epoch, None before the first time. is_waking: whether a wake is in progress.
    """

    def __init__(
        self,
        deployment: SleepableDeployment,
        operations: Operations,
        send: Callable[[str, Message], object],
        ledger: MemoryLedger | None = None,
    ) -> None:
        self.ledger: MemoryLedger = ledger or NoLedger()
        self.ranks: dict[str, RankAsleep] = {}
        self.is_whole = False
        self.level = 0
        self.lost: set[str] = set()
        self.wakes = 0
        self.slept_at: float | None = None
        self.woke_at: float | None = None
        self.is_waking = False
        self._deployment = deployment
        self._operations = operations
        self._answers = Answers[SleepDone](deployment, send)
        self._numbers = 0
        self._progress: dict[str, tuple[int, int]] = {}
        self._has_new_loss = False
        self._refusal: MstarError | None = None

    # -- readings ----------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[str]:
        """Nodes that sleep on at least one rank."""
        return sorted({node for rank in self.ranks.values() for node in rank.nodes})

    @property
    def freed(self) -> int:
        """Bytes of devices that all ranks have given back."""
        return sum(rank.freed for rank in self.ranks.values())

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of the current wake: done, and all that are known."""
        return sum(done for done, _ in self._progress.values()), sum(total for _, total in self._progress.values())

    def of_rank(self, rank: int) -> RankAsleep:
        """Return the sleep of a rank, as leader and as follower together."""
        mine = [each for name, each in self.ranks.items() if process_rank(name) == rank]
        nodes = {node: level for each in mine for node, level in each.nodes.items()}
        return RankAsleep(nodes, sum(each.freed for each in mine), sum(each.kept for each in mine))

    def is_rank_asleep(self, name: str) -> bool:
        """Return whether all nodes of a process sleep."""
        rank = self.ranks.get(name)
        return rank is not None and (self.is_whole or rank.is_whole)

    def facts(self) -> dict[str, Any]:
        """Return the sleep as the admin socket shows it."""
        return {
            "level": self.level if self.ranks or self.is_whole else 0,
            "nodes": self.nodes,
            "is_whole": self.is_whole,
            "is_waking": self.is_waking,
            "freed": {name: rank.freed for name, rank in sorted(self.ranks.items())},
            "kept": {name: rank.kept for name, rank in sorted(self.ranks.items())},
            "lost": sorted(self.lost),
            "slept_at": self.slept_at,
            "woke_at": self.woke_at,
            "wakes": self.wakes,
        }

    def check_awake(self) -> None:
        """Raise StateConflict if the deployment, or a node of it, sleeps."""
        if self.is_whole or self.ranks:
            what = "the deployment sleeps" if self.is_whole else f"{', '.join(self.nodes)} sleeps"
            raise StateConflict(what, hint=WAKE_HINT.format(name=self._deployment.spec.name), code=ASLEEP)

    # -- orders ------------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1, nodes: Sequence[str] = (), *, is_waiting: bool = False) -> dict[str, Any]:
        """Begin to let the deployment sleep, or some nodes. Returns the record of the operation.

        is_waiting: wait for requests in flight, at most the drain limit. Raises UsageError for a level, NotFound for a
        node, and what `Operations.check_ready` raises. See `refused` for requests that run.
        """
        if level not in LEVELS:
            raise UsageError(f"level {level} does not exist", hint="1 keeps weights in host memory, 2 drops them")
        self.check_nodes(nodes)
        self._operations.check_ready(is_asleep_good=True)
        what = f"sleep of {', '.join(nodes)}" if nodes else "sleep"
        return self._begin(what, self._sleep(level, list(nodes), is_waiting=is_waiting))

    def wake(self, nodes: Sequence[str] = ()) -> dict[str, Any]:
        """Begin to wake the deployment, or some nodes. Returns the record of the operation.

        Raises NotFound, and StateConflict if nothing sleeps or during another operation.
        """
        self.check_nodes(nodes)
        if not (self.is_whole or self.ranks):
            raise StateConflict("nothing sleeps", hint=f"mstarctl ps {self._deployment.spec.name}", code="awake")
        self._operations.check_idle()
        what = f"wake of {', '.join(nodes)}" if nodes and not self.is_whole else "wake"
        return self._begin(what, self._wake([] if self.is_whole else list(nodes)))

    async def refused(self, operation: Mapping[str, Any]) -> None:
        """Wait a moment for the refusal of an order that has begun. Raises it: StateConflict, Unavailable."""
        latest = self._operations.latest
        await self._deployment.changes.until(lambda: not self._operations.is_running, CALLER_S)
        if latest is not None and latest.number == operation["number"] and self._refusal is not None:
            raise self._refusal

    def _begin(self, what: str, work: Coroutine[Any, Any, None]) -> dict[str, Any]:
        self._refusal = None
        return self._operations.begin(what, self._noting(work))

    async def _noting(self, work: Coroutine[Any, Any, None]) -> None:
        """Keep the error of an order for its caller."""
        try:
            await work
        except MstarError as error:
            self._refusal = error
            raise

    def wanted(self, nodes: Sequence[str]) -> None:
        """Wake what requests wait for, unless an operation is in progress; they ask again."""
        if (self.is_whole or self.ranks) and not self._operations.is_running:
            self.wake(() if self.is_whole else nodes)

    def died(self, names: Iterable[str]) -> bool:
        """Note the death of processes. Returns whether the wake starts them again, which begins now if it can.

        The memory of a dead process is free, so only a wake may take it again.
        """
        gone = [name for name in names if process_rank(name) is not None]
        for name in gone:
            self._progress.pop(name, None)
        if self.is_waking or not any(self.is_whole or name in self.ranks for name in gone):
            return False
        self.lost.update(gone)
        self._has_new_loss = True
        self.operation_ended()
        return True

    def operation_ended(self) -> None:
        """Begin the wake after a death, unless an operation is in progress or it was refused before."""
        if self._has_new_loss and not self._operations.is_running:
            self._has_new_loss = False
            self.wanted([])

    def take(self, child: str, message: SleepDone | SleepProgress) -> None:
        """Take the answer of a child, or its progress."""
        if isinstance(message, SleepProgress):
            self._progress[child] = message.done, message.total
        else:
            self._answers.take(child, message)

    def check_nodes(self, nodes: Sequence[str]) -> None:
        """Raise NotFound for a name that the deployment does not have."""
        known = sorted({node for rank in self._deployment.spec.plan.ranks for node in (*rank.nodes, *rank.follows)})
        for node in nodes:
            if node not in known:
                hint = did_you_mean(node, known) or f"its nodes are {', '.join(known)}"
                raise NotFound(f"no node {node!r}", hint=hint, kind="node", name=node)

    # -- sleep -------------------------------------------------------------------------------------------------------

    async def _sleep(self, level: int, nodes: list[str], *, is_waiting: bool) -> None:
        deployment, began = self._deployment, time.monotonic()
        if nodes or self.is_whole:
            await self._order_sleep(level, nodes)
        else:
            has_ended = deployment.pause()
            try:
                limit_s = deployment.spec.drain_timeout_s if is_waiting else REFUSAL_S
                if not await deployment.changes.until(has_ended, limit_s):
                    running = deployment.running_requests()
                    raise _still_running(running, limit_s) if is_waiting else busy_error(running)
                await self._order_sleep(level, [])
            except BaseException:
                deployment.unpause()
                raise
            self.is_whole = True
        self.level = max(self.level, level)
        self.slept_at = time.time()
        facts = {"level": level, "nodes": self.nodes, "freed": self.freed}
        deployment.events.add("deployment.sleeps", **facts, took_s=round(time.monotonic() - began, 3))
        if self.is_whole:
            deployment.fall_asleep(f"level {level}")

    async def _order_sleep(self, level: int, nodes: list[str]) -> None:
        """Let the ranks sleep. If one refuses, those that sleep wake again. Raises StateConflict, StartError."""
        before = self._freed_by_device()
        names = self._processes()
        self._numbers += 1
        message = Sleep(number=self._numbers, level=level, nodes=nodes)
        answers = await self._answers.ask(names, message, message.number) or {}
        refused = next((a for a in answers.values() if a is not None and (a.busy or a.title)), None)
        dead = [name for name, answer in answers.items() if answer is None]
        for name, answer in answers.items():
            if answer is not None and not answer.busy and not answer.title:
                self._note(name, answer, is_sleep=True)
        if refused is not None or dead:
            await self._order_wake(nodes)
            if refused is None:
                raise StateConflict(f"{dead[0]} ended meanwhile", hint="try again", code="restarting")
            if refused.busy:
                raise busy_error(self._deployment.running_requests())
            raise StateConflict(refused.title, refused.detail, refused.hint, code="cannot_sleep")
        freed = Counter(self._freed_by_device())
        freed.subtract(before)
        is_whole = self.is_whole or not nodes
        self.ledger.give_back({device: size for device, size in freed.items() if size > 0}, is_whole=is_whole)

    # -- wake --------------------------------------------------------------------------------------------------------

    async def _wake(self, nodes: list[str]) -> None:
        deployment, began, level = self._deployment, time.monotonic(), self.level
        needed = self._freed_by_device(nodes)
        try:
            self.ledger.take_again(needed, is_whole=not nodes)
        except MstarError as error:
            deployment.events.add("deployment.wake_refused", cause=str(error), needed=sum(needed.values()))
            raise Unavailable(error.title, error.detail, error.hint, code="no_memory") from error
        self.is_waking, woken = True, nodes or self.nodes
        deployment.events.add("deployment.wakes", level=level, nodes=woken, bytes=sum(needed.values()))
        try:
            lost, self.lost = self.lost, set()
            for name in lost:
                self.ranks.pop(name, None)
            deployment.respawn(lost)
            has_lost = await self._order_wake(nodes) or bool(lost)
            await deployment.changes.until(
                lambda: all(child.is_ready for n, child in deployment.children.items() if process_rank(n) is not None)
            )
            if has_lost:  # no request may overtake the news of a new process on the way to the conductor
                self._operations.cordons.tell()
                await deployment.changes.until(lambda: self._operations.cordons.is_known, ANSWER_S)
        finally:
            self.is_waking = False
            self._progress.clear()
        self.wakes += 1
        self.woke_at = time.time()
        if not self.ranks:
            self.level = 0
        deployment.events.add("deployment.woken", level=level, nodes=woken, took_s=round(time.monotonic() - began, 3))
        if self.is_whole:
            self.is_whole = False
            deployment.wake_up()
            deployment.unpause()

    async def _order_wake(self, nodes: list[str]) -> bool:
        """Wake the ranks. One that dies meanwhile loads everything in its next life; returns whether one did."""
        self._numbers += 1
        message = Wake(number=self._numbers, nodes=nodes)
        names = [name for name in self._processes() if name in self.ranks]
        answers = await self._answers.ask(names, message, message.number) or {}
        for name, answer in answers.items():
            if answer is None:
                self.ranks.pop(name, None)
            else:
                self._note(name, answer, is_sleep=False)
        return None in answers.values()

    # -- state -------------------------------------------------------------------------------------------------------

    def _note(self, name: str, answer: SleepDone, *, is_sleep: bool) -> None:
        rank = self.ranks.setdefault(name, RankAsleep())
        rank.nodes, rank.kept, rank.is_whole = dict(answer.asleep), answer.kept, answer.is_whole
        rank.freed += answer.freed if is_sleep else -answer.freed
        if not rank.nodes:
            del self.ranks[name]

    def _processes(self) -> list[str]:
        """Return the living processes with a rank."""
        children = self._deployment.children
        return [name for name, child in children.items() if process_rank(name) is not None and child.is_running]

    def _freed_by_device(self, nodes: Collection[str] = ()) -> dict[str, int]:
        """Return the bytes that ranks of this host have given back, by device. nodes: those that wake; empty for all.

        Of a rank whose nodes do not all wake, the whole is an upper bound.
        """
        devices = {rank.rank: rank.device for rank in self._deployment.spec.plan.ranks if not rank.host}
        freed = Counter[str]()
        for name, asleep in self.ranks.items():
            device = devices.get(process_rank(name) or 0)
            if device is not None and (not nodes or not asleep.nodes.keys().isdisjoint(nodes)):
                freed[device] += asleep.freed
        return dict(freed)


def busy_error(running: Sequence[str]) -> StateConflict:
    """Return the refusal of a sleep that names the requests that run."""
    names = ", ".join(running[:SHOWN]) or "they have ended meanwhile"
    more = f" and {len(running) - SHOWN} more" if len(running) > SHOWN else ""
    return StateConflict(
        "requests are running", f"{names}{more}", "wait for them with --wait, or cancel them", code="busy"
    )


def _still_running(running: Sequence[str], limit_s: float) -> TimedOut:
    return TimedOut(
        "requests are still running",
        f"{', '.join(running[:SHOWN])} did not end within {limit_s:g} s",
        "cancel them, or try again",
    )
