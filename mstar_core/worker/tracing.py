"""Spans of requests and counters of edges on one rank, for telemetry. No tensors.

Cost model: the end of a job costs a few floats and one small struct, about a microsecond; an id sampled in a loop costs
nothing here. The backlog of spans is bounded; the tracer counts those that it drops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from mstar_core.messages.telemetry import EdgeNews, Span
from mstar_core.worker.request import (
    ActiveRun,
    ChunkJob,
    LoopJob,
    SpanTotal,
    TaskJob,
    UnderWay,
    WaitingChunk,
    WorkerRequest,
)

if TYPE_CHECKING:
    from mstar_core.engine.base import Done, StepResult
    from mstar_core.graph import CompiledWalk
    from mstar_core.worker.streaming.inbox import StreamInbox

SHORTEST_S: Final = 0.001
"""Shortest wait that becomes a span."""

PENDING: Final = 4096
"""Maximum number of spans kept until the next batch."""

OPEN_S: Final = 1.0
"""Interval at which running loops are reported."""


def node_at(walk: CompiledWalk, address: int) -> str:
    """Return the node at a task's address, or the first node in the body of the loop at a loop's address."""
    if address < len(walk.tasks):
        return walk.tasks[address].name
    return walk.tasks[min(walk.tasks_within(address - len(walk.tasks)))].name


class Tracer:
    """Collects spans until they are sent. Owned by the executor and used from its thread."""

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
        """Note a collected step; the events until the next call belong to it."""
        self._ended = self._clock()
        self.began = self._ended - result.duration_s
        self._rows = result.rows

    def task(self, entry: TaskJob | ChunkJob, node: str, *, is_looped: bool) -> None:
        """Record the end of a task. Tasks inside a loop add up to one span, sent when the walk ends."""
        request, run = entry.request, entry.run
        self._queued(request, run, node, entry.since, self.began)
        if not is_looped:
            self._add(request, "compute", node, run, self.began, self._ended)
            return
        total = run.totals.get(node)
        if total is None:
            total = run.totals[node] = SpanTotal(self._next_key(), self.began)
        total.count += 1
        total.ended = self._ended

    def loop(self, entry: LoopJob, node: str, done: Done) -> None:
        """Record the end of an engine loop."""
        began = entry.total.began or self.began
        self._queued(entry.request, entry.run, node, entry.since, began)
        key = entry.total.key or self._next_key()
        self._add(entry.request, "compute", node, entry.run, began, self._ended, count=done.iterations, key=key)

    def walk_ended(self, request: WorkerRequest, run: ActiveRun) -> None:
        """Record the totals of a walk's loops."""
        for node, total in run.totals.items():
            self._add(request, "compute", node, run, total.began, total.ended, count=total.count, key=total.key)
        run.totals.clear()

    def chunk(self, request: WorkerRequest, waiting: WaitingChunk) -> None:
        """Record the wait of a walk that got its chunk."""
        now = self._clock()
        if waiting.since and now - waiting.since >= SHORTEST_S:
            node = node_at(waiting.run.share.walk, waiting.address)
            self._add(request, "stall", node, waiting.run, waiting.since, now)

    def transfers(self, request: WorkerRequest, inboxes: Iterable[StreamInbox]) -> None:
        """Record the transfers of a request that ends."""
        for inbox in inboxes:
            if inbox.first_sent:
                span = Span(
                    self._next_key(), request.handle, "transfer", inbox.stream.name, "", inbox.first_sent,
                    inbox.last_came, inbox.received, size_bytes=inbox.size_bytes,
                )  # fmt: skip
                self._keep(span)

    def cache_came(self, request: WorkerRequest, node: str, walk: str, sent: float, size_bytes: int) -> None:
        """Record the transfer of a cache that is imported now. sent: time of sending."""
        edge = cache_edge(node)
        self._keep(
            Span(self._next_key(), request.handle, "transfer", edge, walk, sent, self._clock(), size_bytes=size_bytes)
        )

    def take(self, under_way: Iterable[UnderWay], now: float) -> list[Span]:
        """Return the spans since the last call and, once a second, those of running loops."""
        spans, self._spans = self._spans, []
        if now >= self._next_open:
            self._next_open = now + OPEN_S
            spans += self._open(under_way, now)
        return spans

    def _open(self, under_way: Iterable[UnderWay], now: float) -> Iterable[Span]:
        seen: set[int] = set()
        for entry in under_way:
            if isinstance(entry, TaskJob):
                if id(entry.run) not in seen:
                    yield from self._open_totals(entry, now)
                seen.add(id(entry.run))
            if not isinstance(entry, LoopJob) or not entry.total.began:
                continue
            total = entry.total
            total.key = total.key or self._next_key()
            node = entry.run.share.walk.tasks[entry.task].name
            yield Span(
                total.key, entry.request.handle, "compute", node, entry.run.message.walk, total.began, now, 0,
                self._rows, is_open=True,
            )  # fmt: skip

    def _open_totals(self, entry: TaskJob, now: float) -> Iterable[Span]:
        """Yield the loops of a walk whose iterations are single jobs."""
        for node, total in entry.run.totals.items():
            yield Span(
                total.key, entry.request.handle, "compute", node, entry.run.message.walk, total.began, now, total.count,
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


def cache_edge(node: str) -> str:
    """Return the name under which moves of a node's caches are counted like an edge."""
    return f"{node} cache"


class EdgeKey(NamedTuple):
    """Identity of an edge: its name, nodes and ranks."""

    name: str
    source: str
    into: str
    source_rank: int
    into_rank: int
    is_stream: bool


class EdgeCounters:
    """Counters of one rank. Owned by the executor. streams: name -> (producing node, consuming node).

    The consuming rank counts a stream, from its buffers. The sending rank counts a value that crosses ranks.
    """

    def __init__(self, rank: int, streams: Mapping[str, tuple[str, str]]) -> None:
        self._rank = rank
        self._streams = streams
        self._sums: dict[EdgeKey, list[float]] = {}
        self._reported: dict[EdgeKey, EdgeNews] = {}

    def crossed(self, name: str, source: str, into_rank: int, size_bytes: int, into: str = "") -> None:
        """Count a value of a walk, or a cache, that is sent to another rank."""
        key = EdgeKey(name, source, into, self._rank, into_rank, False)
        found = self._sums.setdefault(key, [0, 0, 0, 0.0])
        found[0] += 1
        found[1] += size_bytes

    def arrived(self, name: str, source: str, source_rank: int, transfer_s: float) -> None:
        """Add the transfer time of a value from another rank, which counted the value."""
        key = EdgeKey(name, source, "", source_rank, self._rank, False)
        found = self._sums.setdefault(key, [0, 0, 0, 0.0])
        found[2] += 1
        found[3] += transfer_s

    def closed(self, request: WorkerRequest) -> None:
        """Add the streams of a request that ends."""
        self._add(self._sums, request)

    def news(self, requests: Iterable[WorkerRequest]) -> list[EdgeNews]:
        """Return the edges whose counters changed since the last call. requests: all open requests."""
        sums = {key: list(found) for key, found in self._sums.items()}
        for request in requests:
            self._add(sums, request)
        made = []
        for key, (items, size, transfers, transfer_s) in sums.items():
            edge = EdgeNews(*key, int(items), int(size), int(transfers), round(transfer_s, 6))
            if self._reported.get(key) != edge:
                self._reported[key] = edge
                made.append(edge)
        return made

    def _add(self, sums: dict[EdgeKey, list[float]], request: WorkerRequest) -> None:
        for name, inbox in request.inboxes.items():
            if not inbox.received:
                continue
            source, into = self._streams.get(name, ("", ""))
            home = request.homes.get(source, self._rank)
            found = sums.setdefault(EdgeKey(name, source, into, home, self._rank, True), [0, 0, 0, 0.0])
            found[0] += inbox.received
            found[1] += inbox.size_bytes
            found[2] += inbox.transfers
            found[3] += inbox.transfer_s
