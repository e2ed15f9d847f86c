"""Consumer's buffer of one stream in one request: items in order, chunks by the chunk policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.errors import EngineError
from mstar_core.graph import ChunkPolicy, Stream
from mstar_core.graph.declare.streams import Chunk, ChunkCursor

if TYPE_CHECKING:
    from torch import Tensor

TRIM: Final = 256
"""Number of consumed ids that are dropped at a time; bounds the memory of long streams."""

_ANY: Final = range(-(1 << 63), 1 << 63)

Takes = Callable[[Sequence[int], bool], None]
"""Called with new ids of a stream, and whether it has ended."""


class StreamInbox:
    """Items of a stream that do not make a chunk yet. Owned by the request.

    policy: the stream's chunk policy with this request's parameters. The producer numbers items; a gap or a repetition
    is an error. is_split: producers on several ranks follow each other, so that an item may overtake earlier ones.
    received: number of items, before the stream's `accept` and `reject` filter them. transfers,
    transfer_s: messages from another rank and their total time. first_sent, last_came: times of the first and the last.
    is_dry: the producer of the last item waits for an item of its own stream.

    Cost model: one id is a comparison and an append; the chunk policy runs only when a chunk may be ready.
    """

    __slots__ = (
        "_ahead",
        "_base",
        "_count",
        "_cursor",
        "_due",
        "_fed",
        "_high",
        "_ids",
        "_low",
        "_pushed",
        "_reject",
        "_takes",
        "_tensor_bytes",
        "_tensors",
        "_total",
        "first_sent",
        "is_dry",
        "last_came",
        "received",
        "stream",
        "transfer_s",
        "transfers",
    )

    def __init__(self, stream: Stream, policy: ChunkPolicy, *, flush: bool, is_split: bool = False) -> None:
        self.stream = stream
        self._ahead: dict[int, int | Tensor] | None = {} if is_split else None
        self.received = 0
        self.transfers = 0
        self.transfer_s = self.first_sent = self.last_came = 0.0
        self.is_dry = False
        self._tensor_bytes = 0
        self._cursor = ChunkCursor(policy, flush=flush)
        self._due = self._cursor.due
        self._total: int | None = None
        accept = stream.accept or _ANY
        self._low, self._high = accept.start, accept.stop
        self._reject = stream.reject
        self._takes: Takes | None = None
        self._fed = 0
        self._ids: list[int] = []
        self._tensors: list[Tensor] = []
        self._base = 0
        self._count = 0
        self._pushed = 0

    def take_id(self, value: int) -> bool:
        """Append the next id. Returns whether a chunk or the end may be ready."""
        self.received += 1
        if self._low <= value < self._high and value not in self._reject:
            self._ids.append(value)
            self._count += 1
        if self._total is not None:
            self._close_if_complete()
            return True
        return self._count >= self._due

    def put_id(self, index: int, value: int) -> bool:
        """Append an id from another process. Raises EngineError when `index` is not the next one."""
        if self._overtakes(index, value):
            return False
        self._expect(index)
        may_be_ready = self.take_id(value)
        while self._ahead and isinstance(following := self._ahead.pop(self.received, None), int):
            may_be_ready = self.take_id(following) or may_be_ready
        return may_be_ready

    def put_tensor(self, index: int, value: Tensor) -> None:
        """Append one tensor item. Raises EngineError when `index` is not the next one."""
        if self._overtakes(index, value):
            return
        self._expect(index)
        self._take_tensor(value)
        while self._ahead and isinstance(following := self._ahead.pop(self.received, None), torch.Tensor):
            self._take_tensor(following)

    def _take_tensor(self, value: Tensor) -> None:
        self.received += 1
        self._tensors.append(value)
        self._tensor_bytes += value.nbytes
        self._count += 1
        self._close_if_complete()

    def end(self, total: int) -> None:
        """Set the total number of items. Idempotent."""
        self._total = total
        self._close_if_complete()

    def feed(self, takes: Takes) -> None:
        """Hand all further ids to a loop in the engine, those that wait here at once. Chunks are single ids."""
        self._push()
        self._takes, self._fed, self._due = takes, self._cursor.due - 1, 0
        self.hand_over()

    def hand_over(self) -> None:
        """Give the loop in the engine, if there is one, its new ids."""
        if self._takes is None:
            return
        start, self._fed = self._fed, self._count
        self._takes(self._ids[start - self._base :], self._total is not None and self.received >= self._total)

    def end_feed(self, count: int) -> None:
        """End the loop in the engine, which has taken `count` ids, or all if there are fewer."""
        self._takes = None
        self._push()
        for _ in range(count):
            if self._cursor.pop() is None:
                break
        self._due = self._cursor.due
        self._trim(self._cursor.oldest_needed)

    def came(self, sent: float, now: float) -> None:
        """Count a message from another rank. sent: time of sending, 0.0 if unknown."""
        if sent:
            self.transfers += 1
            self.transfer_s += now - sent
            self.first_sent = self.first_sent or sent
            self.last_came = now

    @property
    def size_bytes(self) -> int:
        """Bytes of all received items; an id has eight."""
        return self._tensor_bytes or 8 * self.received

    @property
    def missing(self) -> int:
        """Number of further items until the next chunk may be ready, as far as it is known."""
        count = self._due - self._count
        if self._total is not None:
            count = min(count, self._total - self.received)
        return max(0, count)

    @property
    def is_finished(self) -> bool:
        """Whether no further chunk will come."""
        self._push()
        return self._cursor.finished

    @property
    def has_early(self) -> bool:
        """Whether items wait that may be handed over before they make a whole chunk."""
        return self.is_dry and self._cursor.has_early

    def pop(self, *, is_early: bool = False) -> tuple[Chunk, Tensor] | None:
        """Return the next chunk and its items, int64 [n] or stacked tensors [n, ...]; None when none is ready.

        is_early: take items that do not make a whole chunk, see `LeftContext.early`.
        """
        self._push()
        chunk = self._cursor.pop(is_early=is_early)
        if chunk is None:
            return None
        start, stop = chunk.start - self._base, chunk.stop - self._base
        if self._tensors:
            items = torch.stack(self._tensors[start:stop])
        else:
            items = torch.from_numpy(np.array(self._ids[start:stop], dtype=np.int64))
        self._due = self._cursor.due
        self._trim(self._cursor.oldest_needed)
        return chunk, items

    def _overtakes(self, index: int, value: int | Tensor) -> bool:
        """Keep an item of a split stream that came before earlier ones. Returns whether it is one."""
        if self._ahead is None or index <= self.received or index in self._ahead:
            return False
        self._ahead[index] = value
        return True

    def _expect(self, index: int) -> None:
        if index != self.received:
            raise EngineError(
                f"stream {self.stream.name} broke",
                f"received item {index}, expected {self.received}",
                "send the request again",
            )

    def _push(self) -> None:
        if self._pushed != self._count:
            self._cursor.push(self._count - self._pushed)
            self._pushed = self._count

    def _close_if_complete(self) -> None:
        if self._total is not None and self.received >= self._total:
            self._push()
            self._cursor.end(self._count)

    def _trim(self, oldest: int) -> None:
        drop = oldest - self._base
        if self._tensors:
            del self._tensors[:drop]
            self._base = oldest
        elif drop >= TRIM:
            del self._ids[:drop]
            self._base = oldest
