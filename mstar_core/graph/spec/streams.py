"""When a stream is ready: the chunk policies as arithmetic on item numbers. Used by the worker's stream buffers.

No data here: the caller keeps the items, asks `pop` which of them a chunk takes, and may drop those before
`oldest_needed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from mstar_core.errors import GraphError
from mstar_core.graph.spec.edges import ChunkPolicy, FixedChunk, LeftContext, SlidingWindow


class Chunk(NamedTuple):
    """Items start to stop (exclusive) of a stream. fresh: first item that no earlier chunk handed over.

    first: the stream's first chunk. last: its final flush, which holds the last items even if all were handed over.
    """

    start: int
    stop: int
    fresh: int
    first: bool
    last: bool


def policy_for(policy: ChunkPolicy, params: Mapping[str, object]) -> ChunkPolicy:
    """The policy of one request: sizes that come from parameters filled in. params: values by parameter name.

    Raises GraphError when a parameter is not a whole number in range.
    """
    if isinstance(policy, SlidingWindow):
        if policy.first_from is not None:
            _size(policy.first_from, params, 1, least=1)
        return policy.for_request(params)
    if not isinstance(policy, LeftContext):
        return policy
    chunk = _size(policy.chunk_from, params, policy.chunk, least=1)
    return replace(policy, chunk=chunk, left=_size(policy.left_from, params, policy.left, least=0))


def _size(name: str | None, params: Mapping[str, object], default: int, least: int) -> int:
    value = default if name is None else params.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise GraphError(
            f"a chunk policy takes {name!r} = {value!r}",
            hint=f"give a whole number of at least {least}",
            place=name or "",
        )
    return value


class ChunkCursor:
    """Position of a stream's consumer for one request. Owned by the consumer's stream buffer.

    flush: whether the parameter named by the stream's `flush_if` is true. Items are counted after `accept`.
    """

    __slots__ = ("_flush", "_flushed", "_next", "_policy", "_popped", "_pushed", "_total", "_whole")

    def __init__(self, policy: ChunkPolicy, flush: bool = False) -> None:
        self._policy = policy
        self._flush = flush
        self._whole = policy.window if isinstance(policy, SlidingWindow) else self._advance
        self._next = 0  # first item of the next whole chunk
        self._pushed = 0
        self._popped = 0  # items below this one have been handed over
        self._flushed = False
        self._total: int | None = None

    def push(self, count: int = 1) -> None:
        """Count items that came. Raises GraphError when they exceed the announced end."""
        self._pushed += count
        self._check_total()

    def end(self, total: int) -> None:
        """Announce that the stream holds `total` items; those not pushed yet may still come."""
        self._total = total
        self._check_total()

    @property
    def pushed(self) -> int:
        """Items that came so far."""
        return self._pushed

    @property
    def finished(self) -> bool:
        """Whether no chunk will ever come any more."""
        return self._complete and self._peek() is None

    @property
    def due(self) -> int:
        """How many items make the next whole chunk ready; before that only the end of the stream can."""
        if not self._popped and isinstance(self._policy, SlidingWindow) and self._policy.first is not None:
            return self._policy.first
        return self._next + self._whole

    @property
    def ready(self) -> bool:
        """Whether `pop` would give a chunk."""
        return self._peek() is not None

    @property
    def oldest_needed(self) -> int:
        """The lowest item number that a later chunk may take."""
        if self.finished:
            return self._pushed
        match self._policy:
            case LeftContext(left=left):
                return max(0, self._next - left)
            case SlidingWindow() as policy if self._flush:
                return min(self._next, self._final_start(policy))
            case _:
                return min(self._next, self._pushed)

    def pop(self) -> Chunk | None:
        """Take the next chunk, or None when it is not there yet (or never will be: `finished`)."""
        chunk = self._peek()
        if chunk is None:
            return None
        self._popped = max(self._popped, chunk.stop)
        if chunk.last:
            self._flushed = True
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
        fresh = max(start, min(self._popped, stop))
        return Chunk(max(0, start - left), stop, fresh, self._popped == 0, last)

    def _final(self) -> Chunk | None:
        """The final flush: what is left, or for a forced flush of a sliding window its last whole strides."""
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
