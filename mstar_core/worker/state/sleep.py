"""Sleep and wake of a rank's nodes: their device memory is given back and taken again on a thread.

Used by the loops of workers and followers. Other nodes of the rank go on meanwhile, except while weights are read from
their files.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import torch

from mstar_core.engine.memory.node_memory import LoadedAgain, loaded_again
from mstar_core.engine.memory.sleeper import DROPS
from mstar_core.errors import EngineError, MstarError
from mstar_core.messages.sleep import Sleep, SleepDone, SleepProgress, Wake, WakeWanted

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.engine.memory.sleeper import Sleeper
    from mstar_core.engine.runner import NodeRunner

POLL_S: Final = 0.01
"""Interval at which an idle process looks for the end of an order."""

PROGRESS_S: Final = 0.1
PATIENCE_S: Final = 0.3
"""Time for which requests that use a node may delay its sleep: the end of one may still be on its way here."""

Busy = Callable[[frozenset[str]], list[int]]
"""Returns the requests that use some nodes; none named: all nodes."""

Answer = Callable[[SleepDone | SleepProgress | WakeWanted], object]
"""Sends a message to the supervisor."""

Load = Callable[[Collection[str], Callable[[int, int], object]], Mapping[str, "nn.Module"]]
"""Loads nodes again as at the start. Called with their names and a function that takes the bytes read and all bytes."""

log = logging.getLogger(__name__)


class Holds(Protocol):
    """The steps of a rank: nodes that launch none, and whether none does. count: steps in flight."""

    asleep: set[str]
    is_held: bool

    @property
    def count(self) -> int: ...


@dataclass(slots=True)
class NoSteps:
    """Stands for the steps of a follower, which its leader plans."""

    asleep: set[str] = field(default_factory=set)
    is_held: bool = False
    count: int = 0


@dataclass(slots=True)
class _Order:
    """An order that is being carried out. work: None while it waits for steps in flight."""

    message: Sleep | Wake
    names: frozenset[str]
    since: float
    work: Future[int] | None = None


@dataclass(slots=True, kw_only=True)
class RankSleep:
    """Nodes of one rank that sleep. Owned by its worker or follower, and used from its thread.

    runners: by node. owner: returns the node that has the weights of a node, which may be one of its cache branches.
    sleeper: None if the memory of this device cannot be given back; why_not: the reason, and hint: the way out.
    load: reads the weights of nodes again. asleep: level by node, from the begin of its sleep to the end of its wake.
    """

    runners: Mapping[str, NodeRunner] = field(default_factory=dict)
    steps: Holds = field(default_factory=NoSteps)
    owner: Callable[[str], str] = str
    sleeper: Sleeper | None = None
    why_not: str = ""
    hint: str = ""
    load: Load | None = None
    answer: Answer = print
    clock: Callable[[], float] = time.monotonic
    asleep: dict[str, int] = field(default_factory=dict)
    _orders: deque[tuple[Sleep | Wake, Busy, float]] = field(default_factory=deque)
    _order: _Order | None = None
    _wanted: set[str] = field(default_factory=set)
    _thread: ThreadPoolExecutor | None = None
    _done: int = 0
    _total: int = 0
    _next_progress: float = 0.0

    @property
    def is_working(self) -> bool:
        """Whether an order is being carried out, or waits."""
        return self._order is not None or bool(self._orders)

    @property
    def is_active(self) -> bool:
        """Whether a node sleeps or an order is being carried out: then no deferred work may touch any node."""
        return bool(self.asleep) or self.is_working

    @property
    def placed_bytes(self) -> int:
        """Bytes of the device that the nodes have outside the allocator of PyTorch."""
        return 0 if self.sleeper is None else self.sleeper.placed_bytes

    def begin(self, message: Sleep | Wake, busy: Busy) -> None:
        """Begin to carry out an order, or refuse it."""
        self._orders.append((message, busy, self.clock()))
        self.turn()

    def turn(self) -> int:
        """Go on with the orders. Returns how many have ended. Raises the error of a wake that has failed."""
        ended = 0
        while self._order is not None or self._orders:
            if self._order is None:
                message, busy, since = self._orders[0]
                if isinstance(message, Wake):
                    self._begin_wake(message)
                elif not self._begin_sleep(message, busy, since):
                    break
                self._orders.popleft()
                continue
            if not self._goes_on(self._order):
                break
            ended += 1
        return ended

    def want(self) -> None:
        """Report the sleeping nodes that have work, once for each sleep."""
        new = {name for name in self.asleep if name not in self._wanted and self.runners[name].pressure().ready}
        if new:
            self._wanted |= new
            self.answer(WakeWanted(nodes=sorted(new)))

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    # -- orders ------------------------------------------------------------------------------------------------------

    def _named(self, nodes: Sequence[str]) -> frozenset[str]:
        """Return the nodes of this rank that an order names."""
        return frozenset(self.runners) if not nodes else frozenset(map(self.owner, nodes)) & set(self.runners)

    def _begin_sleep(self, message: Sleep, busy: Busy, since: float) -> bool:
        """Begin a sleep or refuse it. Returns False while requests delay it."""
        names = frozenset(name for name in self._named(message.nodes) if self.asleep.get(name, 0) < message.level)
        if names and self.sleeper is None:
            self.answer(SleepDone(number=message.number, title=self.why_not, hint=self.hint))
            return True
        awake = frozenset(name for name in names if name not in self.asleep)
        if awake and (used := busy(awake if message.nodes else frozenset())):
            if self.clock() < since + PATIENCE_S:
                return False
            self.answer(SleepDone(number=message.number, busy=used, asleep=dict(self.asleep)))
            return True
        for name in names:
            self.asleep[name] = message.level
            if name in awake:
                self.runners[name].sleeps()
        self._wanted -= names
        self.steps.asleep |= names
        self._order = _Order(message, names, self.clock())
        return True

    def _begin_wake(self, message: Wake) -> None:
        names = frozenset(name for name in self._named(message.nodes) if name in self.asleep)
        self._done = self._total = 0
        self.steps.is_held = any(self.asleep[name] >= DROPS for name in names)
        self._order = _Order(message, names, self.clock())

    def _goes_on(self, order: _Order) -> bool:
        """Go on with an order. Returns whether it has ended."""
        if order.work is None:
            if self.steps.is_held and self.steps.count:
                return False
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="sleep")
            is_sleep = isinstance(order.message, Sleep)
            order.work = self._thread.submit(self._pause if is_sleep else self._resume, order)
            if order.names:
                return False
            order.work.result()
        has_ended = order.work.done()
        self._report(order)
        if not has_ended:
            return False
        self._order = None
        if isinstance(order.message, Sleep):
            self._slept(order, order.work)
        else:
            self._woke(order, order.work)
        return True

    def _report(self, order: _Order) -> None:
        now = self.clock()
        if self._total and isinstance(order.message, Wake) and now >= self._next_progress:
            self._next_progress = now + PROGRESS_S
            self.answer(SleepProgress(number=order.message.number, done=self._done, total=self._total))

    def _slept(self, order: _Order, work: Future[int]) -> None:
        assert self.sleeper is not None or not order.names
        error = work.exception()
        if error is not None:
            log.error("nodes cannot sleep", exc_info=error)
            self.sleeper.resume(order.names, []) if self.sleeper is not None else None
            self._forget(order.names)
            known = error if isinstance(error, MstarError) else EngineError(f"{type(error).__name__}: {error}")
            detail, hint = known.detail or known.title, known.hint
            title = "the memory of nodes cannot be given back"
            self.answer(SleepDone(number=order.message.number, title=title, detail=detail, hint=hint))
            return
        log.info("%s sleeps, after %.2f s", ", ".join(sorted(order.names)), self.clock() - order.since)
        self._answer(order, work.result())

    def _woke(self, order: _Order, work: Future[int]) -> None:
        self.steps.is_held = False
        freed = work.result()  # an error ends the process: its next incarnation loads everything
        self._forget(order.names)
        log.info("%s awake, after %.2f s", ", ".join(sorted(order.names)), self.clock() - order.since)
        self._answer(order, freed)

    def _answer(self, order: _Order, freed: int) -> None:
        kept = 0 if self.sleeper is None else self.sleeper.kept_bytes
        asleep, is_whole = dict(self.asleep), len(self.asleep) == len(self.runners)
        number = order.message.number
        self.answer(SleepDone(number=number, asleep=asleep, is_whole=is_whole, freed=freed, kept=kept))

    def _forget(self, names: frozenset[str]) -> None:
        for name in names:
            self.asleep.pop(name, None)
        self.steps.asleep -= names
        self._wanted -= names

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _pause(self, order: _Order) -> int:
        if self.sleeper is None or not isinstance(order.message, Sleep):
            return 0
        level, sleeper = order.message.level, self.sleeper
        with torch.inference_mode():
            return sum(sleeper.pause(name, level) for name in sorted(order.names))

    def _resume(self, order: _Order) -> int:
        if self.sleeper is None:
            return 0
        sleeper, pairs = self.sleeper, list[LoadedAgain]()
        weights = sleeper.dropped(order.names)
        if weights:
            assert self.load is not None
            modules = dict(self.load(sleeper.loads(order.names), self._read))
            for name in list(modules):
                old = self.runners[name].node_memory().module
                if old is not None:
                    pairs += loaded_again(old, modules.pop(name), weights)
            del modules
        else:
            regions = [region for name in order.names for region in sleeper.regions(name) if region.is_asleep]
            self._total = sum(region.size_bytes for region in regions)
        with torch.inference_mode():
            return sleeper.resume(order.names, pairs, self._copied if not weights else _ignore)

    def _read(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def _copied(self, size: int) -> None:
        self._done += size


def _ignore(size: int) -> None:
    """Do not count copies of what was read from files as progress again."""
