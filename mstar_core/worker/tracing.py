"""Where the time of requests goes on this rank: spans of jobs, of waits in queues and for streams. No tensors.

Cost model: a job that ends costs a few floats and one small struct, about a microsecond; an id drawn in a loop costs
nothing here. What is not sent with the next batch is bounded, and what is too much is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mstar_core.messages.telemetry import Span

if TYPE_CHECKING:
    from mstar_core.engine.base import Done, StepResult
    from mstar_core.graph import CompiledWalk
    from mstar_core.worker.jobs import UnderWay
    from mstar_core.worker.request import ActiveRun, WaitingChunk, WorkerRequest
    from mstar_core.worker.resident import ResidentJob, TaskJob
    from mstar_core.worker.stream_inbox import StreamInbox
    from mstar_core.worker.stream_loop import RelayJob

SHORTEST_S: Final = 0.001
"""A shorter wait is no span."""

PENDING: Final = 4096
"""Spans kept until the next batch."""

OPEN_S: Final = 1.0
"""How often a loop that goes on is told of."""


@dataclass(slots=True)
class Tally:
    """A loop's time so far. began: when its first step did, 0.0 before that."""

    key: int = 0
    began: float = 0.0
    ended: float = 0.0
    count: int = 0


def node_at(walk: CompiledWalk, address: int) -> str:
    """The node of a task's address; for a loop's, which lies behind those of tasks, the first node of its body."""
    if address < len(walk.tasks):
        return walk.tasks[address].name
    return walk.tasks[min(walk.tasks_within(address - len(walk.tasks)))].name


class Tracer:
    """Collects spans until they are sent. Owned by the executor; every method is called from the worker's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.dropped = 0
        self.began = 0.0
        self._clock = clock
        self._ended = 0.0
        self._rows = 0
        self._spans: list[Span] = []
        self._key = 0
        self._next_open = 0.0

    def step(self, result: StepResult) -> None:
        """A step was collected: what follows until the next one was part of it."""
        self._ended = self._clock()
        self.began = self._ended - result.duration_s
        self._rows = result.rows

    def task(self, entry: TaskJob | RelayJob, node: str, *, is_looped: bool) -> None:
        """A firing ended. Firings inside a loop become one span, sent when its walk ends."""
        request, run = entry.request, entry.run
        self._queued(request, run, node, entry.since, self.began)
        if not is_looped:
            self._add(request, "compute", node, run, self.began, self._ended)
            return
        tally = run.tallies.get(node)
        if tally is None:
            tally = run.tallies[node] = Tally(self._next_key(), self.began)
        tally.count += 1
        tally.ended = self._ended

    def loop(self, entry: ResidentJob, node: str, done: Done) -> None:
        """A loop of the engine ended."""
        began = entry.tally.began or self.began
        self._queued(entry.request, entry.run, node, entry.since, began)
        key = entry.tally.key or self._next_key()
        self._add(entry.request, "compute", node, entry.run, began, self._ended, count=done.iterations, key=key)

    def walk_ended(self, request: WorkerRequest, run: ActiveRun) -> None:
        """Send what the firings of a walk's loops added up to."""
        for node, tally in run.tallies.items():
            self._add(request, "compute", node, run, tally.began, tally.ended, count=tally.count, key=tally.key)
        run.tallies.clear()

    def chunk(self, request: WorkerRequest, waiting: WaitingChunk) -> None:
        """A walk got the chunk of a stream that it waited for."""
        now = self._clock()
        if waiting.since and now - waiting.since >= SHORTEST_S:
            node = node_at(waiting.run.share.walk, waiting.address)
            self._add(request, "stall", node, waiting.run, waiting.since, now)

    def transfers(self, request: WorkerRequest, inboxes: Iterable[StreamInbox]) -> None:
        """The request ends: tell what came for it from other ranks."""
        for inbox in inboxes:
            if inbox.first_sent:
                span = Span(
                    self._next_key(), request.handle, "transfer", inbox.stream.name, "", inbox.first_sent,
                    inbox.last_came, inbox.received, size_bytes=inbox.size_bytes,
                )  # fmt: skip
                self._keep(span)

    def take(self, under_way: Iterable[UnderWay], now: float) -> list[Span]:
        """The spans since the last call and, once a second, those of loops that go on."""
        spans, self._spans = self._spans, []
        if now >= self._next_open:
            self._next_open = now + OPEN_S
            spans += self._open(under_way, now)
        return spans

    def _open(self, under_way: Iterable[UnderWay], now: float) -> Iterable[Span]:
        for entry in under_way:
            tally = getattr(entry, "tally", None)
            if tally is None or not tally.began:
                continue
            tally.key = tally.key or self._next_key()
            node = entry.run.share.walk.tasks[entry.task].name  # type: ignore[union-attr]  # only loops have a tally
            yield Span(
                tally.key, entry.request.handle, "compute", node, entry.run.message.walk, tally.began, now, 0,
                self._rows, is_open=True,
            )  # fmt: skip

    def _queued(self, request: WorkerRequest, run: ActiveRun, node: str, since: float, until: float) -> None:
        waited = until - since
        if since and waited >= SHORTEST_S:
            request.waited_s += waited
            self._add(request, "queue", node, run, since, until)

    def _add(
        self, request: WorkerRequest, kind: str, node: str, run: ActiveRun, start: float, end: float, *,
        count: int = 1, key: int = 0,
    ) -> None:  # fmt: skip
        walk = run.message.walk
        self._keep(Span(key or self._next_key(), request.handle, kind, node, walk, start, end, count, self._rows))

    def _keep(self, span: Span) -> None:
        if len(self._spans) < PENDING:
            self._spans.append(span)
        else:
            self.dropped += 1

    def _next_key(self) -> int:
        self._key += 1
        return self._key
