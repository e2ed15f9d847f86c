"""Steps of a device: scheduling, launch, collection in each node's own order, and statistics.

On a CPU a launch computes the step, so one step runs at a time. On a GPU every node may queue its next step behind the
running one, and nodes with a CUDA stream of their own run concurrently. Finished steps are collected first, so a
slow codec step never delays the ids of a decode step.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from mstar_core.engine.base import Handle, JobKey, Pressure, StepResult
from mstar_core.engine.runner import NodeRunner, Running
from mstar_core.observe.metrics import STEP_ROWS, STEP_SECONDS, StepHistogram

LEAST_NAP_S: Final = 20e-6
MOST_NAP_S: Final = 1e-3
NAP_SHARE: Final = 0.005
"""Length of a nap as a share of the time that the wait has lasted so far.

The wait ends late by at most this share, and long steps cost little CPU.
"""

FULL_ROWS: Final = 8
"""Ready batch items with which a node that feeds others launches at once; larger batches save little per item."""

Ranges = Callable[[str, str], AbstractContextManager[object]]
"""(launch or collect, node) -> context manager around it."""

_NOTHING: Final = nullcontext()


def no_range(what: str, node: str) -> AbstractContextManager[object]:
    """Return a context manager that does nothing."""
    return _NOTHING


def ranges_on(device: str, *, is_wanted: bool) -> Ranges:
    """Return NVTX marks for the steps of a device, `cpu` or `cuda:INDEX`. A CPU has none."""
    if not is_wanted or not device.startswith("cuda"):
        return no_range

    def marked(what: str, node: str) -> AbstractContextManager[object]:
        return torch.cuda.nvtx.range(f"{what} {node}")

    return marked


Split = Callable[[str, StepResult], Mapping[str, StepResult]]
"""(runner, its step) -> node -> its part of the step. Cache branches of a node run in its steps."""


def whole(runner: str, result: StepResult) -> Mapping[str, StepResult]:
    """Return the step as that of one node."""
    return {runner: result}


RECENT: Final = 256
"""Number of latest steps for quantiles."""


@dataclass(slots=True)
class NodeStatistics:
    """Counts and times of one node's steps since the start. Owned by the worker's loop, read by telemetry.

    launch_s, collect_s, route_s: host seconds for launching, collecting (waits included) and routing. busy_s: seconds
    from launch to collection; steps of several nodes overlap.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    batch: int = 0
    last_step_s: float = 0.0
    launch_s: float = 0.0
    collect_s: float = 0.0
    route_s: float = 0.0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    took: StepHistogram = field(default_factory=lambda: StepHistogram(STEP_SECONDS))
    batched: StepHistogram = field(default_factory=lambda: StepHistogram(STEP_ROWS))

    def add(self, result: StepResult) -> None:
        """Count one step."""
        self.steps += 1
        self.rows += result.rows
        self.tokens += result.tokens
        self.busy_s += result.duration_s
        self.batch = result.rows
        self.last_step_s = result.duration_s
        self.recent_s.append(result.duration_s)
        self.took.add(result.duration_s)
        self.batched.add(result.rows)

    def values(self) -> dict[str, float]:
        """Return totals, size and time of the last step, quantiles of recent ones and histogram buckets."""
        recent = sorted(self.recent_s)
        last = len(recent) - 1
        return {
            "steps": self.steps,
            "rows": self.rows,
            "tokens": self.tokens,
            "busy_s": round(self.busy_s, 4),
            "batch": self.batch,
            "step_s": round(self.last_step_s, 6),
            "step_p50_s": round(recent[last // 2], 6) if recent else 0.0,
            "step_p99_s": round(recent[last * 99 // 100], 6) if recent else 0.0,
            "launch_s": round(self.launch_s, 4),
            "collect_s": round(self.collect_s, 4),
            "route_s": round(self.route_s, 4),
            **self.took.values(),
            **self.batched.values(),
        }


@dataclass(slots=True)
class FairShare:
    """Fair-share scheduling of device time among nodes. Owned by the worker's loop.

    It chooses the node with the least device time among those with ready work. A light node (a codec) is therefore
    served at once, and a heavy one (a language model) takes the rest. A node that was idle starts level with the others
    and cannot save up time. A job that has waited longer than `patience_s` goes first.
    """

    runners: Mapping[str, NodeRunner]
    clock: Callable[[], float] = time.monotonic
    patience_s: float = 0.5
    used_s: dict[str, float] = field(default_factory=dict)
    idle: set[str] = field(default_factory=set)

    def choose(self, waiting: Collection[str] = ()) -> NodeRunner | None:
        """Return the runner to launch now, or None. waiting: nodes whose ready jobs are all blocked."""
        ready = {
            name: p for name, runner in self.runners.items() if name not in waiting and (p := runner.pressure()).ready
        }
        if not ready:
            self.idle = set(self.runners)
            return None
        busy = [self.used_s.get(name, 0.0) for name in ready if name not in self.idle]
        floor = min(busy, default=max(self.used_s.values(), default=0.0))
        for name in ready:
            if name in self.idle:
                self.used_s[name] = max(self.used_s.get(name, 0.0), floor)
        self.idle = set(self.runners) - set(ready)
        oldest = min(ready, key=lambda name: ready[name].oldest_s)
        if self.clock() - ready[oldest].oldest_s > self.patience_s:
            return self.runners[oldest]
        return self.runners[min(ready, key=lambda name: (self.used_s.get(name, 0.0), name))]

    def charge(self, name: str, duration_s: float) -> None:
        """Add the device time of a step to its node."""
        self.used_s[name] = self.used_s.get(name, 0.0) + duration_s


class Order(Protocol):
    """Work that goes before other steps of the device, see `FirstSounds`."""

    def keys(self, node: str) -> frozenset[JobKey]:
        """Return such jobs at a node."""

    def must_wait(self, node: str, carried: Sequence[Collection[JobKey]]) -> bool:
        """Return whether a node launches no step now. carried: such jobs of each of its steps in flight."""


@dataclass(slots=True, kw_only=True)
class Steps:
    """Steps of all nodes of a device. Owned by the worker's loop.

    lookahead: steps of one node that may be queued behind the running one (0 on a CPU). spin_s: length of busy-polling
    before a wait naps. ranges: profiler marks around launches and collections. split: divides steps among nodes for the
    statistics. in_flight: steps by node, oldest first. collected: number of collected steps. waited_s: seconds that the
    thread spent waiting for steps. asleep: nodes that launch no steps. is_held: no node launches a step.
    order: None if no work goes first. carried: of each step in flight, the jobs that go first.
    """

    runners: Mapping[str, NodeRunner]
    scheduler: FairShare
    lookahead: int = 0
    spin_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    ranges: Ranges = no_range
    split: Split = whole
    collected: int = 0
    waited_s: float = 0.0
    asleep: set[str] = field(default_factory=set)
    is_held: bool = False
    order: Order | None = None
    in_flight: dict[str, deque[Running]] = field(default_factory=dict)
    carried: dict[str, deque[frozenset[JobKey]]] = field(default_factory=dict)
    statistics: defaultdict[str, NodeStatistics] = field(default_factory=lambda: defaultdict(NodeStatistics))

    def __post_init__(self) -> None:
        for name in self.runners:
            self.in_flight[name], self.carried[name] = deque(), deque()
            self.statistics[name] = NodeStatistics()

    @property
    def count(self) -> int:
        """Steps in flight."""
        return sum(len(steps) for steps in self.in_flight.values())

    @property
    def is_deadlocked(self) -> bool:
        """Whether jobs wait for slots or pages that no request of this rank will free.

        A request that holds slots and does not wait here may wait for another rank, and free them later.
        """
        if self.count:
            return False
        nodes = [runner.contention() for name, runner in self.runners.items() if name not in self.asleep]
        holding = set[Handle]().union(*(node.holding for node in nodes))
        waiting = set[Handle]().union(*(node.waiting for node in nodes))
        return bool(waiting) and holding <= waiting

    def launch(self) -> list[str]:
        """Launch one step of the next node, or with lookahead one step of every node. Returns their names."""
        if self.is_held:
            return []
        if not self.lookahead:
            return self._launch_one()
        launched: list[str] = []
        is_fed = False
        pressures = {name: runner.pressure() for name, runner in self.runners.items() if name not in self.asleep}
        for name in sorted(pressures, key=lambda name: (not self._goes_first(name), not pressures[name].feeds)):
            if self._must_wait(name):
                continue
            # The results that feed this node are routed first; its step in flight leaves time for that.
            if is_fed and self.in_flight[name]:
                continue
            if self._may(name, pressures[name]) and self._launch(self.runners[name]):
                launched.append(name)
                is_fed = is_fed or pressures[name].feeds
        return launched

    def collect(self, launched: list[str]) -> Iterator[StepResult]:
        """Collect the oldest finished step of each node. launched: nodes that launched a step in this turn.

        A node that launched its first step and may launch another one behind it waits for the next turn.
        """
        for name, steps in self.in_flight.items():
            if not steps or (name in launched and len(steps) <= self.lookahead):
                continue
            runner = self.runners[name]
            if self.lookahead and not runner.is_done(steps[0]):
                continue
            started = self.clock()
            with self.ranges("collect", name):
                result = runner.collect(steps.popleft())
            self.carried[name].popleft()
            self.collected += 1
            self.scheduler.charge(name, result.duration_s)
            statistics = self.statistics[name]
            for node, part in self.split(name, result).items():
                self.statistics[node].add(part)
            statistics.collect_s += self.clock() - started
            if result.decides and self.lookahead and not steps and not self.is_held and not self._must_wait(name):
                self._launch(runner)  # the device waits for it, and need not wait for the results to be routed
            collected = self.clock()
            yield result  # the caller routes it before the next collection
            statistics.route_s += self.clock() - collected

    def wait(self, is_called: Callable[[], bool]) -> None:
        """Wait until a step is done or `is_called` returns True."""
        started = self.clock()
        while not any(steps and self.runners[name].is_done(steps[0]) for name, steps in self.in_flight.items()):
            lasted = self.clock() - started
            if lasted < self.spin_s:
                if is_called():  # also releases the interpreter lock
                    break
                continue
            nap = min(max(lasted * NAP_SHARE, LEAST_NAP_S), MOST_NAP_S)
            if lasted > MOST_NAP_S and is_called():
                break
            self.sleep(nap)
        self.waited_s += self.clock() - started

    def _launch_one(self) -> list[str]:
        """Launch a step of the next node that has runnable jobs."""
        waiting = set(self.asleep)
        while (runner := self.scheduler.choose(waiting)) is not None:
            if self._launch(runner):
                return [runner.name]
            waiting.add(runner.name)
        return []

    def _may(self, name: str, pressure: Pressure) -> bool:
        """Whether a node has ready jobs and should not wait for more, which steps of other nodes may bring."""
        if not pressure.ready:
            return False
        others = [steps for other, steps in self.in_flight.items() if other != name]
        if pressure.feeds and pressure.ready < FULL_ROWS and any(len(steps) > self.lookahead for steps in others):
            return False
        return not (pressure.is_patient and any(others))

    def _goes_first(self, name: str) -> bool:
        """Whether a node with a cache has work of a first sound that no step in flight has: others need its results."""
        if self.order is None or not self.runners[name].has_cache:
            return False
        return bool(self.order.keys(name).difference(*self.carried[name]))

    def _must_wait(self, name: str) -> bool:
        return self.order is not None and self.order.must_wait(name, self.carried[name])

    def _launch(self, runner: NodeRunner) -> bool:
        started = self.clock()
        carried = frozenset[JobKey]() if self.order is None else self.order.keys(runner.name)
        with self.ranges("launch", runner.name):
            running = runner.launch()
        if running is None:
            return False
        self.in_flight[runner.name].append(running)
        self.carried[runner.name].append(carried)
        self.statistics[runner.name].launch_s += self.clock() - started
        return True
