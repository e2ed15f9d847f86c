"""The consumer's end of one stream of one request: items in order, chunks when the policy says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar_core.errors import EngineError
from mstar_core.graph import ChunkPolicy, Stream
from mstar_core.graph.stream import Chunk, ChunkCursor

if TYPE_CHECKING:
    from torch import Tensor

GROW = 256  # ids; one allocation per three seconds of speech


class StreamInbox:
    """Buffers a stream's items until they make a chunk. Owned by the request; freed with it.

    policy: the stream's chunk policy as this request's parameters make it. Items are numbered by the
    producer; a gap or a repetition is an error of the stream, never silently wrong data.
    `total` counts every item sent, `accepted` those that passed the stream's accept range.
    """

    __slots__ = ("_base", "_count", "_cursor", "_due", "_ids", "_tensors", "_total", "received", "stream")

    def __init__(self, stream: Stream, policy: ChunkPolicy, *, flush: bool) -> None:
        self.stream = stream
        self.received = 0
        self._cursor = ChunkCursor(policy, flush=flush)
        self._due = self._cursor.due
        self._total: int | None = None
        self._ids: np.ndarray = np.empty(GROW, dtype=np.int64)
        self._tensors: list[Tensor] = []
        self._base = 0
        self._count = 0

    def put_id(self, index: int, value: int) -> bool:
        """Take one id; whether a chunk or the end may be there now. Raises EngineError when it is out of turn."""
        self._expect(index)
        accept = self.stream.accept
        if accept is None or accept.start <= value < accept.stop:
            position = self._count - self._base
            if position == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty(len(self._ids), dtype=np.int64)])
            self._ids[position] = value
            self._count += 1
            self._cursor.push(1)
        self._close_if_complete()
        return self._count >= self._due or self._total is not None

    def put_tensor(self, index: int, value: Tensor) -> None:
        """Take one tensor item. Raises EngineError when `index` is not the next one."""
        self._expect(index)
        self._tensors.append(value)
        self._count += 1
        self._cursor.push(1)
        self._close_if_complete()

    def end(self, total: int) -> None:
        """The producer sent `total` items in all. Idempotent."""
        self._total = total
        self._close_if_complete()

    @property
    def is_finished(self) -> bool:
        """Whether no chunk will come any more."""
        return self._cursor.finished

    def pop(self) -> tuple[Chunk, Tensor] | None:
        """The next chunk and its items: int64 [n] for ids, stacked [n, ...] for tensors; None when none is ready."""
        chunk = self._cursor.pop()
        if chunk is None:
            return None
        start, stop = chunk.start - self._base, chunk.stop - self._base
        if self._tensors:
            items = torch.stack(self._tensors[start:stop])
        else:
            items = torch.from_numpy(self._ids[start:stop].copy())
        self._due = self._cursor.due
        self._trim(self._cursor.oldest_needed)
        return chunk, items

    def _expect(self, index: int) -> None:
        if index != self.received:
            raise EngineError(
                f"stream {self.stream.name} broke",
                f"item {index} came where {self.received} was due",
                "send the request again",
            )
        self.received += 1

    def _close_if_complete(self) -> None:
        if self._total is not None and self.received >= self._total:
            self._cursor.end(self._count)

    def _trim(self, oldest: int) -> None:
        drop = oldest - self._base
        if self._tensors:
            del self._tensors[:drop]
            self._base = oldest
        elif drop >= GROW:
            kept = self._ids[drop : self._count - self._base].copy()
            self._ids[: len(kept)] = kept
            self._base = oldest
