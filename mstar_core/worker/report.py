"""Telemetry of a worker, at most ten times a second: gauges, counters, requests, spans and edges."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.base import Handle
from mstar_core.engine.cuda_graphs.kernel_log import KernelLog
from mstar_core.engine.runner import NodeRunner
from mstar_core.messages.telemetry import EdgeNews, RequestNews
from mstar_core.process.leftovers import Leftovers
from mstar_core.process.life import ChildLife
from mstar_core.transport.shm import TensorTransport
from mstar_core.worker.executor import Executor
from mstar_core.worker.peer_memory.transport import PeerMemory
from mstar_core.worker.steps import Steps
from mstar_core.worker.telemetry.tracing import node_at

if TYPE_CHECKING:
    from mstar_core.worker.state.request import ActiveRun

log = logging.getLogger(__name__)

PERIOD_S: Final = 0.1
REQUESTS_S: Final = 0.2
MEMORY_S: Final = 1.0

QUIET_S: Final = 1.9
"""Further time between reports while nothing happens: gauges of memory and of idle time change without news."""

PATIENCE_S: Final = 0.02
"""Maximum delay of a report in favour of turns with other work; a new request should not wait for a report."""

LONG_S: Final = 10.0
"""Length of a wait for slots, pages or a stream that is logged."""

Facts = tuple[int, int, str, tuple[int, int, float] | None]
"""(sampled ids, pages, reason of the wait, progress) of one request."""


@dataclass(slots=True)
class _Wait:
    """Wait of one request at one node. since, steps: time and step count at its begin. why: what it waits for."""

    since: float
    steps: int
    why: str
    is_logged: bool = False


@dataclass(slots=True)
class Waits:
    """Waits by request and node. Owned by the worker's report."""

    _waits: dict[tuple[Handle, str], _Wait] = field(default_factory=dict)

    def update(self, now: float, runners: Mapping[str, NodeRunner], steps: int) -> None:
        """Update the waits and log each long one once. steps: number of collected steps of all nodes.

        A wait without a single step is a warning: the requests that it depends on do not run either.
        """
        whys = {
            (handle, node): why
            for node, runner in runners.items()
            for handle, (_, why) in runner.pages_and_waits().items()
            if why
        }
        for ended in self._waits.keys() - whys.keys():
            self._end(ended, now)
        for key, why in whys.items():
            wait = self._waits.setdefault(key, _Wait(now, steps, why))
            wait.why = why
            if not wait.is_logged and now - wait.since >= LONG_S:
                wait.is_logged = True
                level = logging.INFO if steps > wait.steps else logging.WARNING
                log.log(
                    level,
                    "request %d %s for %.0f s%s",
                    key[0],
                    f"{why} of {_room(runners[key[1]])}",
                    now - wait.since,
                    "" if steps > wait.steps else ", and no step ran meanwhile",
                )

    def _end(self, key: tuple[Handle, str], now: float) -> None:
        wait = self._waits.pop(key)
        if wait.is_logged:
            log.info("request %d no longer %s of %s, after %.1f s", key[0], wait.why, key[1], now - wait.since)


def _room(runner: NodeRunner) -> str:
    """`LLM (402 of 520 slots, 800 of 2,547 pages in use)`."""
    use = runner.memory()
    slots = f"{use.slots_used:,} of {use.slots_total:,} slots"
    return f"{runner.name} ({slots}, {use.pages_used:,} of {use.pages_total:,} pages in use)"


@dataclass(slots=True, kw_only=True)
class Report:
    """Telemetry of a worker. Owned by its loop.

    shown: runner -> cache branch under whose name it reports, where the deployment places only the branch on this rank.
    placed_bytes: returns the device memory outside the allocator of PyTorch.
    has_news: something changed since the last batch. due: earliest time of the next one. delayed_since: first turn in
    which a due report was delayed, or None.
    """

    life: ChildLife
    executor: Executor
    transport: TensorTransport
    runners: Mapping[str, NodeRunner]
    steps: Steps
    kernels: KernelLog = field(default_factory=KernelLog)
    leftovers: Leftovers = field(default_factory=Leftovers)
    peer_memory: PeerMemory | None = None
    shown: Mapping[str, str] = field(default_factory=dict)
    idle_s: float = 0.0
    has_news: bool = False
    due: float = 0.0
    delayed_since: float | None = None
    reported: dict[str, float] = field(default_factory=dict)
    reported_requests: dict[int, Facts] = field(default_factory=dict)
    walks: set[str] = field(default_factory=set)
    places: dict[tuple[int, str], str] = field(default_factory=dict)
    in_walks: dict[str, float] = field(default_factory=dict)
    next_requests: float = 0.0
    memory: dict[str, float] = field(default_factory=dict)
    next_memory: float = 0.0
    waits: Waits = field(default_factory=Waits)
    placed_bytes: Callable[[], int] = int

    def send(self, now: float, *, is_busy: bool = False) -> None:
        """Send the changes if a report is due. is_busy: this turn had other work."""
        if now < self.due or not (self.has_news or now >= self.due + QUIET_S):
            return
        if is_busy:
            self.delayed_since = now if self.delayed_since is None else self.delayed_since
            if now - self.delayed_since < PATIENCE_S:
                return
        self.delayed_since = None
        self.due = now + PERIOD_S
        self.has_news = False
        news, edges = self._of_requests(now)
        values = self.values(now)
        changed = {name: value for name, value in values.items() if self.reported.get(name) != value}
        tracer = self.executor.tracer
        spans = tracer.take(self.executor.under_way, now)
        if changed or news or spans or edges:
            self.reported = values
            self.life.telemetry(changed, news, spans, edges, dropped=tracer.dropped)

    def _of_requests(self, now: float) -> tuple[list[RequestNews], list[EdgeNews]]:
        """Return the changes of requests and edges, half as often as gauges: they are most of the work."""
        if now < self.next_requests:
            return [], []
        self.next_requests = now + REQUESTS_S
        self.in_walks = self._walks()
        self.waits.update(now, self.runners, self.steps.collected)
        return self.requests(), self.executor.edges.news(self.executor.requests.values())

    def requests(self) -> list[RequestNews]:
        """Return the changes of the open requests, and the last counts of those that ended."""
        held: dict[int, tuple[int, str]] = {}
        for runner in self.runners.values():
            for handle, (pages, why) in runner.pages_and_waits().items():
                pages_before, why_before = held.get(handle, (0, ""))
                held[handle] = (pages_before + pages, why or why_before)
        facts: dict[int, Facts] = {}
        ended, self.executor.ended = self.executor.ended, []
        for handle, tokens, at in (*ended, *(request.reported for request in self.executor.requests.values())):
            pages, why = held.get(handle, (0, ""))
            progress = None if at is None else (at.step, at.steps, at.rate)
            facts[handle] = (tokens, pages, why, progress)
        before = self.reported_requests
        self.reported_requests = {handle: facts[handle] for handle in self.executor.requests}
        return [
            RequestNews(
                handle=handle,
                tokens=tokens,
                pages=pages,
                why=why,
                step=progress and progress[0],
                steps=progress and progress[1],
                step_rate=progress and progress[2],
            )
            for handle, (tokens, pages, why, progress) in facts.items()
            if before.get(handle) != facts[handle]
        ]

    def values(self, now: float) -> dict[str, float]:
        """Return gauges and counters of this rank by name; those of a node begin with its name and a dot."""
        values: dict[str, float] = {
            "requests": len(self.executor.requests),
            "leftovers": self.leftovers.closed,
            "steps": self.steps.collected,
            "idle_s": round(self.idle_s, 3),
            "wait_s": round(self.steps.waited_s, 3),
            "shm_bytes": self.transport.used_bytes,
            "sent_bytes": self.transport.sent_bytes,
            "shm_live": self.transport.live,
            **self.executor.moves.counters(),
            **self.executor.features.counters(),
            **self.kernels.counters(),
            **self.in_walks,
            **self._memory(now),
        }
        if self.peer_memory is not None:
            values |= self.peer_memory.counters()
            values["sent_bytes"] += self.peer_memory.sent_bytes
        for node, runner in self.runners.items():
            values |= _of_node(self.shown.get(node, node), _gauges(runner))
        for node, statistics in self.steps.statistics.items():
            if statistics.steps:
                values |= _of_node(node, statistics.values())
        ahead, node = self.executor.least_ahead_s(), self.executor.playing_node
        if node in self.runners:
            values[f"{node}.underruns"] = self.executor.playback.underruns
            if ahead is not None:
                values[f"{node}.ahead_s"] = round(ahead, 2)
        return values

    def _walks(self) -> dict[str, float]:
        """Count the requests in each walk, by the first node of the walk on this rank."""
        counts: Counter[str] = Counter()
        for request in self.executor.requests.values():
            for run in request.active.values():
                counts[self._place(run)] += 1
        self.walks.update(counts)
        return {name: counts[name] for name in self.walks}

    def _place(self, run: ActiveRun) -> str:
        key = id(run.share), run.message.walk  # shares are never freed
        if key not in self.places:
            tasks = run.share.tasks
            node = node_at(run.share.walk, min(tasks)) if tasks else ""
            self.places[key] = f"{node}.walk.{run.message.walk}"
        return self.places[key]

    def _memory(self, now: float) -> dict[str, float]:
        """Return the device memory of this process, read once a second."""
        if now >= self.next_memory:
            self.next_memory = now + MEMORY_S
            self.memory = device_memory(self.placed_bytes())
        return self.memory


def device_memory(placed_bytes: int = 0) -> dict[str, float]:
    """Return the device memory of this process for telemetry; empty on a CPU.

    placed_bytes: of memory outside the allocator of PyTorch.
    """
    if not torch.cuda.is_initialized():
        return {}
    device = torch.cuda.current_device()
    return {
        "memory_used": torch.cuda.memory_reserved(device) + placed_bytes,
        "memory_total": torch.cuda.get_device_properties(device).total_memory,
    }


def _gauges(runner: NodeRunner) -> dict[str, float]:
    memory, pressure = runner.memory(), runner.pressure()
    return {
        "pages_total": memory.pages_total,
        "pages_used": memory.pages_used,
        "pages_cached": memory.pages_cached,
        "pages_leased": memory.pages_leased,
        "slots_used": memory.slots_used,
        "slots_total": memory.slots_total,
        "preempted": memory.preempted,
        "preempted_pages": memory.preempted_pages,
        "preempted_last": memory.last_preempted or 0,
        "ready": pressure.ready,
        "waiting": pressure.waiting,
        **runner.counters(),
    }


def _of_node(node: str, readings: Mapping[str, float]) -> dict[str, float]:
    return {f"{node}.{reading}": value for reading, value in readings.items()}
