"""Spans of requests and counters of edges on one rank, for telemetry. No tensors.

Cost model: the end of a job costs a few floats and one small struct, about a microsecond. A step of loops that ran
together before costs a microsecond, whatever their number; another step costs two lookups and four additions for each
row. The backlog of spans is bounded; the tracer counts those that it drops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from mstar_core.engine.base import StepResult
from mstar_core.messages.telemetry import EdgeNews, Span
from mstar_core.worker.state.request import (
    ActiveRun,
    ChunkJob,
    LoopJob,
    MoveJob,
    Recorded,
    SpanTotal,
    TaskJob,
    UnderWay,
    WaitingChunk,
    WorkerRequest,
)
from mstar_core.worker.telemetry.shared_steps import SharedLoops

if TYPE_CHECKING:
    from mstar_core.engine.base import Done, JobKey
    from mstar_core.graph import CompiledWalk
    from mstar_core.worker.state.stream_inbox import StreamInbox

SHORTEST_S: Final = 0.001
"""Shortest wait that becomes a span."""

PENDING: Final = 4096
"""Maximum number of spans kept until the next batch."""

OPEN_S: Final = 1.0
"""Interval at which running loops are reported."""


def loops_alone(result: StepResult) -> np.ndarray | None:
    """Return the jobs of a step that did nothing but iterations of loops, as most steps do, once; None for others."""
    loop = result.loop
    if loop is None or result.ran or result.done or result.failed or result.emissions:
        return None
    return loop.keys[: len(loop.keys) // loop.steps]


def jobs_of(result: StepResult) -> Collection[JobKey]:
    """Return the keys of all jobs that a step ran, each once."""
    if (alone := loops_alone(result)) is not None:
        keys_alone: list[JobKey] = alone.tolist()
        return keys_alone
    loops: list[JobKey] = [] if result.loop is None else result.loop.keys.tolist()
    keys = {*result.ran, *loops}
    keys.update(done.job.key for done in result.done)
    keys.update(failed.job.key for failed in result.failed)
    keys.update(emission.job.key for emission in result.emissions)
    return keys


def node_of(entry: UnderWay) -> str:
    """Return the node that a job runs, which may be a cache branch of the runner's node."""
    match entry:
        case MoveJob():
            return entry.move.node
        case ChunkJob():
            return entry.run.share.walk.tasks[0].name
        case TaskJob() | LoopJob():
            return entry.run.share.walk.tasks[entry.task].name


def parts_by_node(result: StepResult, nodes: Sequence[str]) -> dict[str, StepResult]:
    """Divide the time, batch items and tokens of a step among the nodes of its jobs. nodes: one for each job."""
    shares = {node: count / len(nodes) for node, count in Counter(nodes).items()}
    return {
        node: StepResult(
            rows=max(1, round(result.rows * share)),
            tokens=round(result.tokens * share),
            duration_s=result.duration_s * share,
        )
        for node, share in shares.items()
    }


def node_at(walk: CompiledWalk, address: int) -> str:
    """Return the node at a task's address, or the first node in the body of the loop at a loop's address."""
    if address < len(walk.tasks):
        return walk.tasks[address].name
    return walk.tasks[min(walk.tasks_within(address - len(walk.tasks)))].name


class Tracer:
    """Collects spans until they are sent. Owned by the executor and used from its thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.dropped = 0
        self._clock = clock
        self._ended = 0.0
        self._batch = 0
        self._spans: list[Span] = []
        self._key = 0
        self._next_open = 0.0
        self._shared = SharedLoops()

    def submitted(self, entry: Recorded) -> None:
        """Note the submission of a job."""
        self._shared.settle(entry.request)
        entry.total.spent_before = entry.request.spent_s

    def step(self, result: StepResult, under_way: Mapping[JobKey, UnderWay]) -> None:
        """Add the duration of a collected step to the jobs that it ran.

        The step counts in full for each request. Several jobs of one request have equal parts, so that the times of a
        request's nodes on one rank never add up to more than the time that passed.
        """
        self._ended = self._clock()
        self._batch = result.rows
        alone = loops_alone(result)
        keys = b"" if alone is None else alone.tobytes()
        times = 1 if result.loop is None else result.loop.steps
        if self._shared.count(keys, result.duration_s, times):
            return
        began = self._ended - result.duration_s
        known = (under_way.get(key) for key in jobs_of(result))
        entries = [entry for entry in known if entry is not None and not isinstance(entry, MoveJob)]
        share_s = result.duration_s / max(1, len(entries))
        if len({entry.request.handle for entry in entries}) == len(entries):
            for entry in entries:
                self._spend(entry, began, result.duration_s, share_s, times)
            if alone is not None:
                self._shared.note(keys, entries)
            return
        jobs = Counter(entry.request.handle for entry in entries)
        for entry in entries:  # queues exclude this step of the request's other jobs
            if not entry.total.began:
                self._begins(entry, began)
        for entry in entries:
            self._spend(entry, began, result.duration_s / jobs[entry.request.handle], share_s, times)

    def _spend(self, entry: Recorded, began: float, part_s: float, share_s: float, times: int) -> None:
        total, request = entry.total, entry.request
        if not total.began:
            self._begins(entry, began)
        total.count += times if isinstance(entry, LoopJob) else 1
        total.busy_s += part_s
        total.device_s += share_s
        request.spent_s += part_s

    def task(self, entry: TaskJob | ChunkJob, node: str, *, is_looped: bool) -> None:
        """Record the end of a task. Tasks inside a loop add up to one span, sent when the walk ends."""
        request, run, job_total = entry.request, entry.run, entry.total
        self._shared.settle(request)
        if not job_total.began:
            self._begins(entry, self._ended)
        if not is_looped:
            span = (request, "compute", node, run, job_total.began, self._ended)
            self._add(*span, busy_s=job_total.busy_s, device_s=job_total.device_s)
            self._queued(entry, node, "queue")
            return
        total = run.totals.get(node)
        if total is None:
            since = entry.since or job_total.began
            total = run.totals[node] = SpanTotal(self._next_key(), since=since, began=job_total.began)
        total.count += 1
        total.ended = self._ended
        total.busy_s += job_total.busy_s
        total.device_s += job_total.device_s
        total.queued_s += max(0.0, self._ready_s(entry) - job_total.busy_s) if entry.since else 0.0

    def loop(self, entry: LoopJob, node: str, done: Done) -> None:
        """Record the end of an engine loop."""
        self._end_loop(entry, node, done.iterations)

    def walk_ended(self, request: WorkerRequest, run: ActiveRun) -> None:
        """Record the totals of a walk's loops."""
        for node, total in run.totals.items():
            span = (request, "compute", node, run, total.began, total.ended)
            self._add(*span, count=total.count, key=total.key, busy_s=total.busy_s, device_s=total.device_s)
            if total.queued_s >= SHORTEST_S:
                self._add(request, "queue", node, run, total.since, total.ended, busy_s=total.queued_s)
        run.totals.clear()

    def closed(self, request: WorkerRequest, under_way: Mapping[JobKey, UnderWay]) -> None:
        """Record what ran for a request that ends before its walks do."""
        self._shared.settle(request)
        for key in request.jobs:
            entry = under_way.get(key)
            if isinstance(entry, LoopJob) and entry.total.began:
                self._end_loop(entry, entry.run.share.walk.tasks[entry.task].name, entry.total.count)
        for run in request.active.values():
            self.walk_ended(request, run)

    def chunk(self, request: WorkerRequest, waiting: WaitingChunk) -> None:
        """Record the wait of a walk that got its chunk."""
        now = self._clock()
        if waiting.since and now - waiting.since >= SHORTEST_S:
            node = node_at(waiting.run.share.walk, waiting.address)
            self._add(request, "wait", node, waiting.run, waiting.since, now)

    def transfers(self, request: WorkerRequest, inboxes: Iterable[StreamInbox]) -> None:
        """Record the transfers of a request that ends."""
        for inbox in inboxes:
            if inbox.first_sent:
                span = Span(
                    self._next_key(),
                    request.handle,
                    "transfer",
                    inbox.stream.name,
                    "",
                    inbox.first_sent,
                    inbox.last_came,
                    inbox.received,
                    size_bytes=inbox.size_bytes,
                )
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
                    for node, total in entry.run.totals.items():
                        yield self._open_span(entry, node, total, now)
                seen.add(id(entry.run))
            if isinstance(entry, LoopJob) and entry.total.began:
                self._shared.settle(entry.request)
                entry.total.key = entry.total.key or self._next_key()
                yield self._open_span(entry, entry.run.share.walk.tasks[entry.task].name, entry.total, now)

    def _open_span(self, entry: TaskJob | LoopJob, node: str, total: SpanTotal, now: float) -> Span:
        return Span(
            total.key,
            entry.request.handle,
            "compute",
            node,
            entry.run.message.walk,
            total.began,
            now,
            total.count,
            self._batch,
            is_open=True,
            busy_s=total.busy_s,
            device_s=total.device_s,
        )

    def _begins(self, entry: Recorded, began: float) -> None:
        """Note the first step of a job. Its queue excludes the steps of the request's other jobs."""
        self._shared.settle(entry.request)
        total = entry.total
        total.began = began
        spent = entry.request.spent_s - total.spent_before
        total.queued_s = max(0.0, began - entry.since - spent) if entry.since else 0.0

    def _ready_s(self, entry: Recorded) -> float:
        """Return the time since a job's submission without the steps of the request's other jobs."""
        others = entry.request.spent_s - entry.total.spent_before - entry.total.busy_s
        return max(0.0, self._ended - entry.since - others)

    def _end_loop(self, entry: LoopJob, node: str, iterations: int) -> None:
        total = entry.total
        self._shared.leave(entry)
        if not total.began:
            self._begins(entry, self._ended)
        span = (entry.request, "compute", node, entry.run, total.began, self._ended)
        self._add(*span, count=iterations, key=total.key, busy_s=total.busy_s, device_s=total.device_s)
        self._queued(entry, node, "queue" if entry.feed is None else "wait")

    def _queued(self, entry: Recorded, node: str, between: str) -> None:
        """Record the queue of a job before its first step, and the time between its steps as the kind `between`."""
        total, since = entry.total, entry.since
        if not since:
            return
        if total.queued_s >= SHORTEST_S:
            self._add(entry.request, "queue", node, entry.run, since, total.began, busy_s=total.queued_s)
        rest = self._ready_s(entry) - total.queued_s - total.busy_s
        if rest >= SHORTEST_S:
            self._add(entry.request, between, node, entry.run, total.began, self._ended, busy_s=rest)

    def _add(
        self,
        request: WorkerRequest,
        kind: str,
        node: str,
        run: ActiveRun,
        start: float,
        end: float,
        *,
        count: int = 1,
        key: int = 0,
        busy_s: float | None = None,
        device_s: float = 0.0,
    ) -> None:
        place = (key or self._next_key(), request.handle, kind, node, run.message.walk)
        self._keep(Span(*place, start, end, count, self._batch, busy_s=busy_s, device_s=device_s))

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
        sums = self._sums.setdefault(key, [0, 0, 0, 0.0])
        sums[0] += 1
        sums[1] += size_bytes

    def arrived(self, name: str, source: str, source_rank: int, transfer_s: float) -> None:
        """Add the transfer time of a value from another rank, which counted the value."""
        key = EdgeKey(name, source, "", source_rank, self._rank, False)
        sums = self._sums.setdefault(key, [0, 0, 0, 0.0])
        sums[2] += 1
        sums[3] += transfer_s

    def closed(self, request: WorkerRequest) -> None:
        """Add the streams of a request that ends."""
        self._add(self._sums, request)

    def news(self, requests: Iterable[WorkerRequest]) -> list[EdgeNews]:
        """Return the edges whose counters changed since the last call. requests: all open requests."""
        sums = {key: list(counts) for key, counts in self._sums.items()}
        for request in requests:
            self._add(sums, request)
        news = []
        for key, (items, size, transfers, transfer_s) in sums.items():
            edge = EdgeNews(*key, int(items), int(size), int(transfers), round(transfer_s, 6))
            if self._reported.get(key) != edge:
                self._reported[key] = edge
                news.append(edge)
        return news

    def _add(self, sums: dict[EdgeKey, list[float]], request: WorkerRequest) -> None:
        for name, inbox in request.inboxes.items():
            if not inbox.received:
                continue
            source, into = self._streams.get(name, ("", ""))
            home = request.homes.get(source, self._rank)
            counts = sums.setdefault(EdgeKey(name, source, into, home, self._rank, True), [0, 0, 0, 0.0])
            counts[0] += inbox.received
            counts[1] += inbox.size_bytes
            counts[2] += inbox.transfers
            counts[3] += inbox.transfer_s
