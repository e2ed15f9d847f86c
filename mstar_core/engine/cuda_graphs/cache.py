"""CUDA-graph cache: captured steps by kind and size, with one memory pool, capture queue and set of counts per node.

A step (`StaticStep`) owns static buffers and a forward over them. `StepBuckets` holds the steps of one kind by size,
and a batch runs, padded, in the smallest bucket that holds it. Decode, prefill, loop passes, prefixes and captured
functions are such kinds.
"""

from __future__ import annotations

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from operator import ge
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import torch

from mstar_core.engine.device import free_bytes
from mstar_core.errors import StartError

if TYPE_CHECKING:
    from mstar_core.engine.cuda_graphs.kinds import StepKind

log = logging.getLogger(__name__)

MOST_MISSED: Final = 64
"""Missed buckets that are remembered."""

WARM_UPS: Final = 2
"""Uncaptured runs of a step before its capture."""

DECODE_FIRST: Final = (1, 8, 32)
PREFILL_FIRST: Final = (128, 512, 2048)
"""The largest is among them, because steps hold no more tokens than the largest captured bucket."""

PREFILL_LATER: Final = (64, 256, 384, 768, 1024, 1536)

Size = tuple[int, ...]
"""Size of a bucket, such as (sequences,) or (packed tokens, sequences)."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSizes:
    """Sizes to capture: sequences of decode steps, packed tokens of prefill. The later ones are captured when idle."""

    decode: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()
    decode_later: tuple[int, ...] = ()
    prefill_later: tuple[int, ...] = ()


def sizes_for(slots: int) -> CaptureSizes:
    """Return the sizes that a deployment with so many slots captures.

    The largest decode bucket is `slots` and is captured before the first request, so that every decode batch has a
    bucket from the start. Powers of two and a step between each two of them follow when the node is idle.
    """
    first = {size for size in DECODE_FIRST if size < slots} | {slots}
    powers = [1 << exponent for exponent in range(slots.bit_length())]
    between = [power * 3 // 2 for power in powers if power >= 16]
    steps = {size for size in (*powers, *between) if size < slots}
    return CaptureSizes(
        decode=tuple(sorted(first)),
        decode_later=tuple(sorted(steps - first)),
        prefill=PREFILL_FIRST,
        prefill_later=PREFILL_LATER,
    )


@dataclass(slots=True)
class GraphCounts:
    """Counts of one cache.

    hits: steps replayed; misses: steps of which at least a part ran uncaptured. prefill_hits, prefill_misses: the same
    for prefill; prefill_tokens: tokens of both. captured: graphs; capture_s: time spent on captures; bytes: device
    memory that they took, buffers included; replans: attention plans that decode steps made again.
    planned: returns the captures that are left. takes_missed: a bucket that steps missed is captured before the others.
    """

    hits: int = 0
    misses: int = 0
    prefill_hits: int = 0
    prefill_misses: int = 0
    prefill_tokens: int = 0
    captured: int = 0
    capture_s: float = 0.0
    bytes: int = 0
    replans: int = 0
    planned: Callable[[], int] = int
    takes_missed: bool = False

    @property
    def expected_s(self) -> float:
        """Mean time of a capture so far, 0.0 before the first."""
        return self.capture_s / self.captured if self.captured else 0.0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Restore the counts after the block."""
        before = replace(self)
        try:
            yield
        finally:
            for each in fields(self):
                setattr(self, each.name, getattr(before, each.name))

    def as_counters(self) -> dict[str, float]:
        """Return the counts by metric name. The share of replayed steps is graph_hits / (graph_hits + graph_misses)."""
        return {
            "graph_hits": float(self.hits),
            "graph_misses": float(self.misses),
            "prefill_hits": float(self.prefill_hits),
            "prefill_misses": float(self.prefill_misses),
            "prefill_tokens": float(self.prefill_tokens),
            "graphs_captured": float(self.captured),
            "graphs_planned": float(self.planned()),
            "graph_capture_s": self.capture_s,
            "graph_bytes": float(self.bytes),
            "replans": float(self.replans),
        }


@contextmanager
def capturing(pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the launches of the block into a graph. pool: memory pool, as `CUDAGraph.pool` gives it; None: a new one.

    stream: the stream to capture on, None for one that all captures of the process share. Matrix products keep the
    workspace of the stream that they were captured on, so graphs that may run at the same time need streams of their
    own. On a shared one a decoder beside an encoder was seen to hang.
    The garbage collector is off meanwhile: it could free the graph of another node, which ends a capture with an error.
    Calls of other threads are not captured. The graph is replayed once, because its first replay uploads it to the
    device: the buffers must hold values that the captured launches may run on. The block ends when that replay has: a
    step on another stream could use the graph's memory otherwise.
    """
    graph, was_on = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield graph
    finally:
        if was_on:
            gc.enable()
    graph.replay()
    torch.cuda.synchronize()


class StaticStep(ABC, Generic[T]):
    """A step of one size over static buffers. The constructor makes the buffers and parks them on harmless values.

    graph: its captured CUDA graph. Without one (on the CPU) `run` calls `forward`, the same code that is captured
    elsewhere, which is how captured steps are tested there.
    """

    graph: Any = None
    outputs: T | None = None

    @abstractmethod
    def forward(self) -> T:
        """Run the step over its buffers. Captured; returns static tensors that the next run overwrites."""

    def run(self) -> T:
        """Replay the graph, or run the step uncaptured."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.outputs = self.forward()
        assert self.outputs is not None
        return self.outputs

    def capture(self, cache: GraphCache) -> None:
        """Capture the step."""
        self.graph, self.outputs = cache.capture(self.forward)

    def warm_up(self) -> None:
        """Run the step once so that its kernels are compiled."""
        self.forward()


S = TypeVar("S", bound=StaticStep[Any])


class CaptureListener(Protocol):
    """Publishes captures to the followers of a tensor-parallel group."""

    def captures(self, kind: StepKind, size: Size) -> None:
        """Publish a capture that is about to begin."""

    def drops(self, kind: StepKind, size: Size) -> None:
        """Publish that the capture of a size has failed, so that there is no such bucket."""


class StepBuckets(Generic[S]):
    """Captured steps of one kind, by size. Made by `GraphCache.buckets`."""

    def __init__(
        self,
        cache: GraphCache,
        build: Callable[[Size], S],
        title: Callable[[Size], str],
        order: Callable[[Size], Size],
        kind: StepKind | None = None,
    ) -> None:
        """kind: by which the ranks of a tensor-parallel group name it; None for functions of stateless modules."""
        self._cache = cache
        self.kind = kind
        self._steps: dict[Size, S] = {}
        self._requested: set[Size] = set()
        self.build = build
        self.title = title
        self.order = order

    def __bool__(self) -> bool:
        return bool(self._steps)

    def __getitem__(self, size: Size) -> S:
        return self._steps[size]

    @property
    def sizes(self) -> list[Size]:
        """Sizes of the captured buckets, ascending."""
        return sorted(self._steps)

    @property
    def planned(self) -> list[Size]:
        """Sizes that wait for their capture, in its order."""
        return [planned.size for planned in self._cache.queue if planned.buckets is self]

    @property
    def largest(self) -> Size | None:
        """Size of the largest captured bucket."""
        return max(self._steps, default=None)

    def plan(self, sizes: Iterable[Size]) -> None:
        """Queue captures of sizes that are neither captured nor queued."""
        known = {*self._steps, *self.planned}
        self._cache.queue += [_Planned(self, size) for size in sizes if size not in known]
        self._cache.queue.sort(key=lambda each: each.order)

    def request(self, size: Size) -> bool:
        """Return whether a size is captured. The first request queues its capture, which is tried once."""
        if size not in self._requested:
            self._requested.add(size)
            self.plan([size])
        return size in self._steps

    def smallest(self, *least: int, most: int | None = None) -> S | None:
        """Return the smallest bucket that is at least so large in each dimension, None without one.

        most: largest first dimension that is worth its padding.
        """
        # No generator: it would take a call per bucket, in every step.
        fits = [size for size in self._steps if all(map(ge, size, least)) and (most is None or size[0] <= most)]
        found = min(fits, default=None)
        if found is None:
            self.missed(*least)
        return None if found is None else self._steps[found]

    def missed(self, *least: int) -> None:
        """Note that a step missed the smallest queued bucket of at least this size, or without one the largest."""
        if self._cache.queue and (planned := self.planned):
            fits = [size for size in planned if all(map(ge, size, least))]
            self._cache.missed.append(_Planned(self, min(fits) if fits else max(planned)))

    def add(self, size: Size) -> None:
        """Build and capture the bucket of a size, on all ranks of a tensor-parallel group."""
        listener = self._cache.listener
        if listener is not None and self.kind is not None:
            listener.captures(self.kind, size)
        try:
            step = self.build(size)
            step.capture(self._cache)
        except Exception:
            if listener is not None and self.kind is not None:
                listener.drops(self.kind, size)
            raise
        self._steps[size] = step

    def drop(self, size: Size) -> None:
        """Drop the bucket of a size, if there is one."""
        self._steps.pop(size, None)

    def rebuild(self) -> None:
        """Drop all graphs, whose buffers have moved, and queue their captures; on the CPU rebuild them at once."""
        sizes = [*self._steps]
        self._steps.clear()
        self.plan(sizes)
        if self._cache.device.type != "cuda":
            while self._cache.capture_next():
                pass


@dataclass(frozen=True, slots=True)
class _Planned:
    """A capture that waits."""

    buckets: StepBuckets[Any]
    size: Size

    @property
    def order(self) -> Size:
        return self.buckets.order(self.size)

    @property
    def title(self) -> str:
        return self.buckets.title(self.size)


class GraphCache:
    """Captured graphs of one node or module. Owned by it. They are captured on one stream of its own: see `capturing`.

    On the CPU nothing is captured: `capture` returns no graph, and steps run uncaptured.
    listener: set for the leader of a tensor-parallel group.
    missed: queued captures that steps would have used, in the order of the steps. later: further captures that are
    queued once the queue is empty.
    spare_bytes: device memory that the largest uncaptured steps need; captures leave that much free.
    report: called with the phase (`kernels`, then `capture`) and the title of each capture; None once the node serves.
    """

    def __init__(
        self,
        device: torch.device,
        report: Callable[[str, str], None] | None = None,
        spare_bytes: int = 0,
        name: str = "",
    ) -> None:
        self.device = device
        self.report = report
        self.name = name
        self.queue: list[_Planned] = []
        self.missed: deque[_Planned] = deque(maxlen=MOST_MISSED)
        self.later = 0
        self.counts = GraphCounts(planned=lambda: len(self.queue) + self.later)
        self.listener: CaptureListener | None = None
        self._spare_bytes = spare_bytes
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._title = ""

    def buckets(
        self,
        build: Callable[[Size], S],
        title: Callable[[Size], str],
        order: Callable[[Size], Size] = lambda size: size,
        kind: StepKind | None = None,
    ) -> StepBuckets[S]:
        """Make the buckets of one kind of step. kind: None for functions of stateless modules.

        build: makes the step of a size. title: names its capture in logs. order: captures with the lowest value come
        first, among those of all kinds.
        """
        return StepBuckets(self, build, title, order, kind)

    @property
    def is_complete(self) -> bool:
        """Whether no capture is queued."""
        return not self.queue

    def capture_next(self) -> bool:
        """Capture the next bucket, see `GraphCounts.takes_missed`. Returns whether more are queued.

        Called while no step of the node is in flight.

        A bucket that does not fit into memory is left out, and so are all of a kind that cannot be captured. Both are
        logged; the steps run in a larger bucket or uncaptured, and are counted.
        """
        if not self.queue:
            return False
        planned = self._next()
        try:
            self._measured(planned)
        except torch.OutOfMemoryError as error:
            log.error("%s%s does not fit and is left out: %s", self._prefix, planned.title, _first_line(error))
        except Exception as error:  # noqa: BLE001 a step that cannot be captured still runs uncaptured
            self.queue = [each for each in self.queue if each.buckets is not planned.buckets]
            log.error(
                "%s%s and others of its kind run uncaptured: %s: %s",
                self._prefix,
                planned.title,
                type(error).__name__,
                error,
            )
        return bool(self.queue)

    def _next(self) -> _Planned:
        """Take the next capture out of the queue."""
        while self.counts.takes_missed and self.missed:
            planned = self.missed.popleft()
            if planned in self.queue:
                self.queue.remove(planned)
                return planned
        return self.queue.pop(0)

    def capture_all(self) -> None:
        """Capture all queued buckets before the first request.

        A bucket that does not fit into memory is left out and logged. Raises StartError when a kind gets none at all.
        """
        kinds = list({id(each.buckets): each.buckets for each in self.queue}.values())
        shortage: torch.OutOfMemoryError | None = None
        while self.queue:
            planned = self.queue.pop(0)
            try:
                self._measured(planned)
            except torch.OutOfMemoryError as error:
                shortage = error
                log.warning("%s%s does not fit: %s", self._prefix, planned.title, _first_line(error))
        if shortage is not None and not all(kinds):
            raise StartError(
                f"the captured steps of node {self.name} do not fit",
                _first_line(shortage),
                "lower kv_cache.memory_fraction, max_concurrent_requests or token_budget",
                phase="kernels",
            ) from shortage

    def warm_up(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Run each queued step once, uncaptured, so that its capture compiles nothing. Keeps no buffers.

        is_enough: called after the first and the last step; True ends the warm-up.
        """
        ends = [*self.queue[:1], *self.queue[1:][-1:]]
        for planned in ends:
            planned.buckets.build(planned.size).warm_up()
        if ends and is_enough():
            return
        for planned in self.queue[1:-1]:
            planned.buckets.build(planned.size).warm_up()

    def compile_queued(self) -> None:
        """Run queued steps once before serving: a request that meets their capture then waits for milliseconds.

        A step that does not fit into memory now fails no start.
        """
        started, self._title = time.monotonic(), "steps that are captured later"
        self._report("kernels")
        try:
            self.warm_up()
        except torch.OutOfMemoryError as error:
            log.warning("%sa later step was not tried: %s", self._prefix, _first_line(error))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        log.info("%s: %.2f s", self._title, time.monotonic() - started)

    def capture(self, step: Callable[[], T]) -> tuple[Any, T | None]:
        """Capture a step. Returns the graph and the outputs that a replay overwrites; (None, None) on the CPU."""
        if self.device.type != "cuda":
            return None, None
        self._stream = self._stream or torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        self._report("capture")
        with capturing(self._pool, self._stream) as graph:
            outputs = step()
        self._pool = self._pool or graph.pool()
        return graph, outputs

    def _measured(self, planned: _Planned) -> None:
        """Capture a bucket; log and count its time and memory. Raises OutOfMemoryError when spare memory is short."""
        started, before, self._title = time.monotonic(), self._free(), planned.title
        if self.device.type == "cuda" and before < self._spare_bytes:
            free, spare = before >> 20, self._spare_bytes >> 20
            raise torch.OutOfMemoryError(f"{free} MiB are free, and the largest steps may need {spare} MiB of it")
        self._report("kernels")
        planned.buckets.add(planned.size)
        taken, size = time.monotonic() - started, max(0, before - self._free())
        self.counts.captured += 1
        self.counts.capture_s += taken
        self.counts.bytes += size
        log.info("%s: %.2f s, %.0f MiB", planned.title, taken, size / (1 << 20))

    @property
    def _prefix(self) -> str:
        return f"node {self.name}: " if self.name else ""

    def _report(self, phase: str) -> None:
        if self.report is not None:
            self.report(phase, self._title)

    def _free(self) -> int:
        return free_bytes(self.device) if self.device.type == "cuda" else 0


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def up_to(most: int, sizes: Iterable[int], known: Iterable[Size]) -> list[Size]:
    """Return the sizes below `most` and the smallest that reaches it, unless a known bucket does."""
    ascending = sorted(sizes)
    reaching = [] if any(size[0] >= most for size in known) else [size for size in ascending if size >= most][:1]
    return [(size,) for size in [*(size for size in ascending if size < most), *reaching]]
