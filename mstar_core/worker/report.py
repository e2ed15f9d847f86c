"""What a worker tells the supervisor, at most ten times a second: gauges, counters, news of requests, spans, edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.base import NodeRunner, ReportsCounters, ReportsPages
from mstar_core.messages.telemetry import EdgeNews, RequestNews
from mstar_core.process.life import ChildLife
from mstar_core.transport import TensorTransport
from mstar_core.worker.executor import Executor
from mstar_core.worker.steps import Steps
from mstar_core.worker.tracing import node_at
from mstar_core.worker.waits import Waits

if TYPE_CHECKING:
    from mstar_core.worker.request import ActiveRun

PERIOD_S: Final = 0.1
REQUESTS_S: Final = 0.2
MEMORY_S: Final = 1.0

PATIENCE_S: Final = 0.02
"""How long a report waits for a turn with nothing else to do: a request that has just come is not to wait for one."""

Facts = tuple[int, int, str, float]
"""(ids drawn, pages, what it waits for, seconds waited) of one request, as last told."""


@dataclass(slots=True, kw_only=True)
class Report:
    """Owned by the worker's loop. has_news: something changed since the last batch. due: when the next may go.

    held: since when it was due in turns that had something else to do, None where it was not.
    """

    life: ChildLife
    executor: Executor
    transport: TensorTransport
    runners: Mapping[str, NodeRunner]
    steps: Steps
    idle_s: float = 0.0
    has_news: bool = False
    due: float = 0.0
    held: float | None = None
    told: dict[str, float] = field(default_factory=dict)
    told_requests: dict[int, Facts] = field(default_factory=dict)
    walks: set[str] = field(default_factory=set)
    places: dict[tuple[int, str], str] = field(default_factory=dict)
    in_walks: dict[str, float] = field(default_factory=dict)
    next_requests: float = 0.0
    memory: dict[str, float] = field(default_factory=dict)
    next_memory: float = 0.0
    waits: Waits = field(default_factory=Waits)

    def send(self, now: float, *, is_busy: bool = False) -> None:
        """Send what changed, if it is time. is_busy: this turn had other work, and so may the next."""
        if now < self.due:
            return
        if is_busy:
            self.held = now if self.held is None else self.held
            if now - self.held < PATIENCE_S:
                return
        self.held = None
        self.due = now + PERIOD_S
        self.has_news = False
        news, edges = self._of_requests(now)
        values = self.values(now)
        changed = {name: value for name, value in values.items() if self.told.get(name) != value}
        tracer = self.executor.tracer
        spans = tracer.take(self.executor.under_way, now)
        if changed or news or spans or edges:
            self.told = values
            self.life.telemetry(changed, news, spans, edges, dropped=tracer.dropped)

    def _of_requests(self, now: float) -> tuple[list[RequestNews], list[EdgeNews]]:
        """What is looked for in every request is looked for half as often: it is most of the work."""
        if now < self.next_requests:
            return [], []
        self.next_requests = now + REQUESTS_S
        self.in_walks = self._walks()
        self.waits.look(now, self.runners, self.steps.collected)
        return self.requests(), self.executor.edges.news(self.executor.requests.values())

    def requests(self) -> list[RequestNews]:
        """What changed of the requests that live here."""
        held: dict[int, tuple[int, str]] = {}
        for runner in self.runners.values():
            if isinstance(runner, ReportsPages):
                for handle, (pages, why) in runner.pages_and_waits().items():
                    before = held.get(handle, (0, ""))
                    held[handle] = (before[0] + pages, why or before[1])
        facts: dict[int, Facts] = {}
        for handle, request in self.executor.requests.items():
            pages, why = held.get(handle, (0, ""))
            facts[handle] = (request.tokens, pages, why, round(request.waited_s, 4))
        told, self.told_requests = self.told_requests, facts
        return [
            RequestNews(handle=handle, tokens=tokens, pages=pages, why=why, waited_s=waited)
            for handle, (tokens, pages, why, waited) in facts.items()
            if told.get(handle) != facts[handle]
        ]

    def values(self, now: float) -> dict[str, float]:
        """Gauges and counters of this rank by name."""
        name = self.life.name
        values = {
            f"{name}.requests": float(len(self.executor.requests)),
            f"{name}.steps": float(self.steps.collected),
            f"{name}.idle_s": round(self.idle_s, 3),
            f"{name}.wait_s": round(self.steps.waited_s, 3),
            f"{name}.shm_bytes": float(self.transport.used_bytes),
            f"{name}.sent_bytes": float(self.transport.sent_bytes),
            f"{name}.shm_live": float(self.transport.live),
        }
        for node, runner in self.runners.items():
            values |= self._node(f"{name}.{node}", node, runner)
        ahead, node = self.executor.least_ahead_s(), self.executor.playing_node
        if node in self.runners:
            values[f"{name}.{node}.underruns"] = float(self.executor.underruns)
            if ahead is not None:
                values[f"{name}.{node}.ahead_s"] = round(ahead, 2)
        return values | self.in_walks | self._memory(now)

    def _node(self, prefix: str, node: str, runner: NodeRunner) -> dict[str, float]:
        memory, pressure = runner.memory(), runner.pressure()
        values = {
            f"{prefix}.pages_total": float(memory.pages_total),
            f"{prefix}.pages_used": float(memory.pages_used),
            f"{prefix}.pages_cached": float(memory.pages_cached),
            f"{prefix}.slots_used": float(memory.slots_used),
            f"{prefix}.slots_total": float(memory.slots_total),
            f"{prefix}.preempted": float(memory.preempted),
            f"{prefix}.preempted_pages": float(memory.preempted_pages),
            f"{prefix}.preempted_last": float(memory.last_preempted or 0),
            f"{prefix}.ready": float(pressure.ready),
            f"{prefix}.waiting": float(pressure.waiting),
        }
        if isinstance(runner, ReportsCounters):
            values |= {f"{prefix}.{key}": value for key, value in runner.counters().items()}
        if self.steps.statistics[node].steps:
            values |= {f"{prefix}.{key}": value for key, value in self.steps.statistics[node].values().items()}
        return values

    def _walks(self) -> dict[str, float]:
        """Requests in each walk here, by the first node of the walk on this rank."""
        counts: Counter[str] = Counter()
        for request in self.executor.requests.values():
            for run in request.active.values():
                counts[self._place(run)] += 1
        self.walks.update(counts)
        return {name: float(counts[name]) for name in self.walks}

    def _place(self, run: ActiveRun) -> str:
        key = id(run.share), run.message.walk  # shares are kept for good
        found = self.places.get(key)
        if found is None:
            tasks = run.share.tasks
            node = node_at(run.share.walk, min(tasks)) if tasks else ""
            found = self.places[key] = f"{self.life.name}.{node}.walk.{run.message.walk}"
        return found

    def _memory(self, now: float) -> dict[str, float]:
        """Device memory of this process, looked at once a second. Empty on a CPU."""
        if now >= self.next_memory:
            self.next_memory = now + MEMORY_S
            if torch.cuda.is_initialized():
                name, device = self.life.name, torch.cuda.current_device()
                self.memory = {
                    f"{name}.memory_used": float(torch.cuda.memory_reserved(device)),
                    f"{name}.memory_total": float(torch.cuda.get_device_properties(device).total_memory),
                }
        return self.memory
