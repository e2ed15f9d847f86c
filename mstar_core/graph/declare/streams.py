"""Streams between partitions: their declaration, their chunk policies and the position of a consumer.

A cursor computes with item numbers only: the caller keeps the items and may drop those before `oldest_needed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from mstar_core.errors import GraphError
from mstar_core.graph.declare.nodes import NodeSpec


@dataclass(frozen=True, slots=True)
class FixedChunk:
    """Ready when `size` items are buffered; a pop takes them all.

    tail: handling of fewer than `size` items at the end (`drop`, or `flush` once).
    after_end: `stop` ends the consumer's loop with the stream, `empty` goes on iterating with an absent port.
    """

    size: int
    tail: Literal["drop", "flush"] = "flush"
    after_end: Literal["stop", "empty"] = "stop"


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Ready when `window` items are buffered; a pop hands over `window` items and advances by `stride`.

    first: size of the first chunk, at most `window`; a smaller one is ready earlier, with less context. Later chunks
    are the same as without `first`.
    first_from: name of a whole-number parameter that sets `first` per request, counted in strides.
    """

    window: int
    stride: int
    tail: Literal["drop", "flush"] = "drop"
    after_end: Literal["stop", "empty"] = "stop"
    first: int | None = None
    first_from: str | None = None

    def for_request(self, params: Mapping[str, object]) -> SlidingWindow:
        """Return the policy of one request. params: its checked parameters."""
        strides = params.get(self.first_from) if self.first_from is not None else None
        return self if not isinstance(strides, int) else replace(self, first=min(strides * self.stride, self.window))


@dataclass(frozen=True, slots=True)
class LeftContext:
    """Ready when `chunk` new items are buffered; a pop hands them over with up to `left` earlier items in front.

    chunk_from, left_from: names of whole-number parameters that replace the numbers per request.
    first: new items of the first chunk, at most `chunk`; a smaller one is ready earlier. The chunks after it are whole.
    first_from: name of a whole-number parameter that sets `first` per request.
    grows: each chunk after the first has twice the new items of the one before, up to `chunk`.
    early: fewer new items than due are handed over when the loop that produces them waits for an item of its own stream
    and the client's sound is about to run dry. Only for consumers whose outputs do not depend on the division.
    """

    chunk: int
    left: int
    tail: Literal["drop", "flush"] = "flush"
    after_end: Literal["stop", "empty"] = "stop"
    chunk_from: str | None = None
    left_from: str | None = None
    first: int | None = None
    first_from: str | None = None
    grows: bool = False
    early: bool = False

    def for_request(self, params: Mapping[str, object]) -> LeftContext:
        """Return the policy of one request. params: its checked parameters."""
        chunk = params.get(self.chunk_from) if self.chunk_from is not None else None
        left = params.get(self.left_from) if self.left_from is not None else None
        first = params.get(self.first_from) if self.first_from is not None else None
        size, first = chunk if isinstance(chunk, int) else self.chunk, first if isinstance(first, int) else self.first
        return replace(
            self,
            chunk=size,
            left=left if isinstance(left, int) else self.left,
            first=None if first is None else min(first, size),
        )


ChunkPolicy = FixedChunk | SlidingWindow | LeftContext


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of items into one port of a node in another partition.

    into: (node, input port). chunk: when the consumer may run. accept: ids outside this range are dropped before
    they are counted, so that special ids never enter a window. reject: ids that are dropped too, such as a stop id.
    flush_if: name of a boolean parameter. When it is true,
    the end of the stream hands over one final chunk with CHUNK_LAST true, whatever `tail` says. For a sliding window
    that chunk holds the last whole strides, at most `window` items, even if an earlier chunk held them.
    """

    name: str
    into: tuple[NodeSpec, str]
    chunk: ChunkPolicy
    accept: range | None = None
    flush_if: str | None = None
    reject: tuple[int, ...] = ()


class Chunk(NamedTuple):
    """Items `start` to `stop` (exclusive) of a stream.

    first: whether it is the first chunk. last: whether it is the final flush, which may repeat items.
    """

    start: int
    stop: int
    first: bool
    last: bool


class ChunkCursor:
    """Position of a stream's consumer in one request. Owned by the consumer's stream buffer.

    flush: whether the parameter named by the stream's `flush_if` is true. Items are counted after `accept`.
    """

    __slots__ = ("_flush", "_flushed", "_next", "_policy", "_popped", "_pushed", "_total", "_whole")

    def __init__(self, policy: ChunkPolicy, flush: bool = False) -> None:
        self._policy = policy
        self._flush = flush
        self._whole = policy.window if isinstance(policy, SlidingWindow) else self._advance
        self._next = 0  # first item of the next whole chunk
        self._pushed = 0
        self._popped = 0  # items below this one are handed over
        self._flushed = False
        self._total: int | None = None

    def push(self, count: int = 1) -> None:
        """Count new items. Raises GraphError when they exceed the announced end."""
        self._pushed += count
        self._check_total()

    def end(self, total: int) -> None:
        """Announce that the stream holds `total` items; some of them may still come."""
        self._total = total
        self._check_total()

    @property
    def finished(self) -> bool:
        """Whether no further chunk will come."""
        return self._complete and self._peek() is None

    @property
    def due(self) -> int:
        """Number of items that makes the next whole chunk ready."""
        if not self._popped and not isinstance(self._policy, FixedChunk) and self._policy.first is not None:
            return self._policy.first
        return self._next + self._whole

    @property
    def ready(self) -> bool:
        """Whether `pop` would return a chunk."""
        return self._peek() is not None

    @property
    def has_early(self) -> bool:
        """Whether there are items that may be handed over early."""
        return isinstance(self._policy, LeftContext) and self._policy.early and self._pushed > self._next

    @property
    def oldest_needed(self) -> int:
        """Lowest item number that a later chunk may hold."""
        if self.finished:
            return self._pushed
        match self._policy:
            case LeftContext(left=left):
                return max(0, self._next - left)
            case SlidingWindow() as policy if self._flush:
                return min(self._next, self._final_start(policy))
            case _:
                return min(self._next, self._pushed)

    def pop(self, *, is_early: bool = False) -> Chunk | None:
        """Take the next chunk. Returns None when it is not ready, or `finished`.

        is_early: take the items that there are, if the policy allows it.
        """
        chunk = self._peek()
        if chunk is None and is_early and self.has_early:
            chunk = self._chunk(self._next, self._pushed, last=False)
        if chunk is None:
            return None
        self._popped = max(self._popped, chunk.stop)
        if chunk.last:
            self._flushed = True
        elif isinstance(self._policy, LeftContext):
            if self._policy.grows:
                self._whole = min(2 * (chunk.stop - self._next), self._policy.chunk)
            self._next = chunk.stop
        else:
            self._next += self._advance
        return chunk

    @property
    def _complete(self) -> bool:
        return self._total is not None and self._pushed >= self._total

    @property
    def _advance(self) -> int:
        match self._policy:
            case FixedChunk(size=size):
                return size
            case SlidingWindow(stride=stride):
                return stride
            case LeftContext(chunk=chunk):
                return chunk

    def _peek(self) -> Chunk | None:
        if self._flushed:
            return None
        if self._pushed >= self.due:
            return self._chunk(self._next, self.due, last=False)
        return self._final() if self._complete else None

    def _chunk(self, start: int, stop: int, last: bool) -> Chunk:
        left = self._policy.left if isinstance(self._policy, LeftContext) else 0
        return Chunk(max(0, start - left), stop, self._popped == 0, last)

    def _final(self) -> Chunk | None:
        """Return the final flush: the remaining items, or the last whole strides of a sliding window if forced."""
        if self._flush and isinstance(self._policy, SlidingWindow):
            start, stop = self._final_start(self._policy), self._pushed // self._policy.stride * self._policy.stride
            stop = min(stop, start + self._policy.window)
        elif self._flush or self._policy.tail == "flush":
            start, stop = self._next, self._pushed
            if stop <= self._popped:
                return None
        else:
            return None
        return self._chunk(start, stop, last=True) if stop > start else None

    def _final_start(self, policy: SlidingWindow) -> int:
        strides = self._pushed // policy.stride
        return max(0, strides - max(1, policy.window // policy.stride)) * policy.stride

    def _check_total(self) -> None:
        if self._total is not None and self._pushed > self._total:
            raise GraphError(
                "a stream holds more items than its end announced",
                detail=f"{self._pushed} items, {self._total} announced",
            )
