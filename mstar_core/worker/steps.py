"""Steps in flight on one device: launched, asked whether they are done, collected in each node's own order.

On a CPU a launch already computes: one step at a time, of the node whose turn it is. On a GPU every node may have its
next step queued behind the running one, and nodes with a stream of their own run beside each other: what ends first
is collected first, so that a slow codec step never holds back the ids of a decode step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from mstar_core.engine.base import NodeRunner, Pressure, Running, StepResult
from mstar_core.worker.ranges import Ranges, no_range
from mstar_core.worker.scheduler import FairShare
from mstar_core.worker.statistics import NodeStatistics

LEAST_NAP_S: Final = 20e-6
MOST_NAP_S: Final = 1e-3
NAP_SHARE: Final = 0.005
"""A wait naps for this share of the time that it has lasted: late by at most that much, and long steps cost no core.

Cost model: on two busy cores of a virtual machine a wait of 13 ms ends some 120 µs late after 117 looks and 4.9 ms of
CPU, one of 100 ms 0.4 ms late after 350 looks and 17 ms; with four times the share 250 µs, 58 looks, 2.8 ms, and
0.8 ms, 146 looks, 8 ms.
"""

COMPANY: Final = 8
"""Rows that a node which feeds others does not wait for more with: a full step of it costs the least a row by then."""


@dataclass(slots=True, kw_only=True)
class Steps:
    """Owned by the worker's loop. lookahead: steps of one node that may wait behind the one that runs (0 on a CPU).

    spin_s: how long a wait looks without naps.
    in_flight: by node, oldest first. collected: how many steps were, of all nodes. waited_s: seconds in which the
    thread did nothing but wait for a step. ranges: marks for a profiler around launches and collections.
    """

    runners: Mapping[str, NodeRunner]
    scheduler: FairShare
    lookahead: int = 0
    spin_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    ranges: Ranges = no_range
    collected: int = 0
    waited_s: float = 0.0
    in_flight: dict[str, deque[Running]] = field(default_factory=dict)
    statistics: dict[str, NodeStatistics] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.runners:
            self.in_flight[name] = deque()
            self.statistics[name] = NodeStatistics()

    @property
    def count(self) -> int:
        """Steps in flight."""
        return sum(len(steps) for steps in self.in_flight.values())

    def launch(self) -> list[str]:
        """Launch what may run now: one step of the node whose turn it is, or ahead of time one of every node."""
        if not self.lookahead:
            return self._launch_one()
        launched: list[str] = []
        is_fed = False
        pressures = {name: runner.pressure() for name, runner in self.runners.items()}
        for name in sorted(pressures, key=lambda name: not pressures[name].feeds):
            # What was just launched for this node is routed first: its step in flight leaves the time for that.
            if is_fed and self.in_flight[name]:
                continue
            if self._may(name, pressures[name]) and self._launch(self.runners[name]):
                launched.append(name)
                is_fed = is_fed or pressures[name].feeds
        return launched

    def collect(self, launched: list[str]) -> Iterator[StepResult]:
        """Collect the oldest step of each node that is done. launched: nodes whose newest step began in this turn.

        A node that has just been given its first step, and may be given another behind it, is left for the next turn.
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
            self.collected += 1
            self.scheduler.charge(name, result.duration_s)
            statistics = self.statistics[name]
            statistics.add(result)
            collected = self.clock()
            statistics.collect_s += collected - started
            yield result  # the caller routes it before it asks for the next
            statistics.route_s += self.clock() - collected

    def wait(self, is_called: Callable[[], bool]) -> None:
        """Wait until some step is done, or `is_called`, asked now and then, says that something else has come up."""
        started = time.monotonic()
        while not any(steps and self.runners[name].is_done(steps[0]) for name, steps in self.in_flight.items()):
            lasted = time.monotonic() - started
            if lasted < self.spin_s:
                if is_called():  # lets go of the interpreter too, for other threads
                    break
                continue
            nap = min(max(lasted * NAP_SHARE, LEAST_NAP_S), MOST_NAP_S)
            if lasted > MOST_NAP_S and is_called():
                break
            time.sleep(nap)
        self.waited_s += time.monotonic() - started

    def _launch_one(self) -> list[str]:
        """Launch a step of the node whose turn it is; where its rows turn out to wait, of the next one."""
        waiting: set[str] = set()
        while (runner := self.scheduler.choose(waiting)) is not None:
            if self._launch(runner):
                return [runner.name]
            waiting.add(runner.name)
        return []

    def _may(self, name: str, pressure: Pressure) -> bool:
        """Whether a node has rows for a step and does not wait for more of them, which only others' steps can bring."""
        if not pressure.ready:
            return False
        others = [steps for other, steps in self.in_flight.items() if other != name]
        if pressure.feeds and pressure.ready < COMPANY and any(len(steps) > self.lookahead for steps in others):
            return False
        return not (pressure.is_patient and any(others))

    def _launch(self, runner: NodeRunner) -> bool:
        started = self.clock()
        with self.ranges("launch", runner.name):
            running = runner.launch()
        if running is None:
            return False
        self.in_flight[runner.name].append(running)
        self.statistics[runner.name].launch_s += self.clock() - started
        return True
