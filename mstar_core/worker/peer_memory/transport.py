"""Transport of tensors between GPU workers of one host: loans in exported memory, and reads that are polled.

A worker copies a tensor into memory that it exports once per segment, and sends the handle when the copy has ended. The
reader maps a segment at its first tensor, copies from it on a side stream, and returns the loan with TensorFreed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.closing import Closing
from mstar_core.errors import ArenaFull, MstarError, TransportError
from mstar_core.messages.tensors import PeerTensor, TensorRef
from mstar_core.transport.arena import ALIGN_BYTES, COUNTER_BITS, FreeList
from mstar_core.transport.tensors import loan_of

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.worker.peer_memory.memory import CopyEnd, DeviceMemory

SEGMENT_BYTES: Final = 64 << 20
"""Least size of a segment. Segments are allocated when they are needed and kept, because readers have them mapped."""

MOST_BYTES: Final = 4 << 30
"""Limit of all segments. Tensors beyond it wait until readers return some, but no longer than PATIENCE_S."""

PATIENCE_S: Final = 0.5
"""Longest wait for room. Then the memory grows beyond its limit, because a message needs all its tensors at once."""

LEAST_BYTES: Final = 32 << 10
"""Tensors up to this size go through the host inside the message, which costs less than a loan."""

FIRST_SLOT: Final = 1 << 20
"""Slot numbers from here on are loans of device memory; those of the arena in shared memory are smaller."""


@dataclass(slots=True)
class _Segment:
    """Exported memory. size: bytes."""

    address: int
    size: int
    handle: bytes
    free: FreeList


@dataclass(frozen=True, slots=True)
class _Lent:
    segment: _Segment
    offset: int
    size: int
    generation: int
    to: str


Lend = Callable[["Tensor", bool], "tuple[PeerTensor, CopyEnd] | None"]
"""Lends a tensor, or returns None without room. The second argument allows growth beyond the limit."""


class OutgoingTensor:
    """A tensor on its way into exported memory. It waits for room if readers have not returned enough."""

    def __init__(self, tensor: Tensor, lend: Lend, clock: Callable[[], float]) -> None:
        self._tensor: Tensor | None = tensor
        self._lend = lend
        self._clock = clock
        self._since = clock()
        self._lent: tuple[PeerTensor, CopyEnd] | None = None
        self._error: MstarError | None = None
        self._start()

    @property
    def is_done(self) -> bool:
        """Whether `ref` is valid, or raises. Polled; starts the copy once there is room."""
        self._start()
        if self._error is not None:
            return True
        if self._lent is None or not self._lent[1].query():
            return False
        self._tensor = None
        return True

    @property
    def ref(self) -> PeerTensor:
        """The handle for the reader. Raises the error that prevented the copy."""
        if self._error is not None:
            raise self._error
        assert self._lent is not None, "read before it is done"
        return self._lent[0]

    def _start(self) -> None:
        if self._lent is not None or self._error is not None or self._tensor is None:
            return
        try:
            self._lent = self._lend(self._tensor, self._clock() - self._since > PATIENCE_S)
        except MstarError as error:  # reported by `ref` to the request of the tensor
            self._error = error


class PeerMemory(Closing):
    """One worker's end. Not thread-safe. sent_bytes, received_bytes: of all tensors so far."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        memory: DeviceMemory,
        peers: Collection[str],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        most_bytes: int = MOST_BYTES,
        least_bytes: int = LEAST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """name, incarnation: of this process's mailbox. peers: names of the workers whose ranks are on GPUs here."""
        self.sent_bytes = self.received_bytes = 0
        self._name = name
        self._incarnation = incarnation
        self._memory = memory
        self._clock = clock
        self._peers = frozenset(peers)
        self._segment_bytes, self._most_bytes, self._least_bytes = segment_bytes, most_bytes, least_bytes
        self._segments: list[_Segment] = []
        self._lent: dict[int, _Lent] = {}
        self._next = 1
        self._slots: list[int] = []
        self._opened: dict[tuple[str, int], dict[bytes, int]] = {}
        self._reads: dict[tuple[str, int, int], tuple[Tensor, CopyEnd]] = {}
        self._failed: dict[tuple[str, int, int], TransportError] = {}

    def counters(self) -> dict[str, float]:
        """Return gauges and counters for telemetry."""
        return {
            "peer_live": self.live,
            "peer_bytes": self.used_bytes,
            "peer_sent_bytes": self.sent_bytes,
            "peer_received_bytes": self.received_bytes,
        }

    # -- sending -----------------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Number of open loans."""
        return len(self._lent)

    @property
    def used_bytes(self) -> int:
        """Bytes in open loans."""
        return sum(loan.size for loan in self._lent.values())

    def suits(self, tensor: Tensor, to: str) -> bool:
        """Return whether a tensor goes to a receiver through device memory."""
        return tensor.nbytes > self._least_bytes and to in self._peers and self._memory.holds(tensor)

    def send(self, tensor: Tensor, to: str) -> OutgoingTensor:
        """Begin to lend a copy of a tensor, behind the work of the current stream."""
        self.sent_bytes += tensor.nbytes
        return OutgoingTensor(tensor, lambda value, may_grow: self._lend(value, to, may_grow=may_grow), self._clock)

    def release(self, slot: int, generation: int) -> bool:
        """End a loan. Returns False if it is none of this memory, or has ended."""
        lent = self._lent.get(slot)
        if lent is None or lent.generation != generation:
            return False
        del self._lent[slot]
        lent.segment.free.give(lent.offset, lent.size)
        self._slots.append(slot)
        return True

    def _lend(self, tensor: Tensor, to: str, *, may_grow: bool) -> tuple[PeerTensor, CopyEnd] | None:
        """Return the handle and the end of the copy; None if there is no room now. Raises ArenaFull if never."""
        size = -(-max(tensor.nbytes, 1) // ALIGN_BYTES) * ALIGN_BYTES
        if size > self._most_bytes:
            raise ArenaFull(
                "a tensor is too large to go to another GPU",
                f"{size} bytes, the limit is {self._most_bytes}",
                "shorten the input, or place the nodes on one rank",
                needed=size,
                free=self._most_bytes,
            )
        place = self._place(size, may_grow=may_grow)
        if place is None:
            return None
        segment, offset = place
        try:
            done = self._memory.write(segment.address + offset, tensor)
        except BaseException:
            segment.free.give(offset, size)
            raise
        slot = self._slots.pop() if self._slots else FIRST_SLOT + len(self._lent)
        generation = (self._incarnation << COUNTER_BITS) + self._next
        self._next += 1
        self._lent[slot] = _Lent(segment, offset, size, generation, to)
        ref = self._memory.form(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            owner=self._name,
            memory=segment.handle,
            offset=offset,
            size_bytes=tensor.nbytes,
            slot=slot,
            generation=generation,
        )
        return ref, done

    def _place(self, size: int, *, may_grow: bool) -> tuple[_Segment, int] | None:
        for segment in self._segments:
            offset = segment.free.take(size)
            if offset is not None:
                return segment, offset
        room = self._most_bytes - sum(segment.size for segment in self._segments)
        if room < size and not may_grow:
            return None
        step = max(size, min(self._segment_bytes, room))
        address = self._memory.allocate(step)
        segment = _Segment(address, step, self._memory.handle(address), FreeList())
        segment.free.give(0, step)
        self._segments.append(segment)
        return segment, segment.free.take(size) or 0

    # -- receiving, as TensorReads (incoming/reads.py) ---------------------------------------------------------------

    @property
    def must_poll(self) -> bool:
        """Whether reads are under way, whose end wakes no mailbox."""
        return bool(self._reads)

    def reads(self, ref: TensorRef) -> bool:
        """Return whether a tensor is in memory of this kind."""
        return isinstance(ref, PeerTensor)

    def begin(self, ref: TensorRef) -> None:
        """Begin to read a tensor. Raises TransportError for a handle that contradicts itself or cannot be mapped."""
        assert isinstance(ref, PeerTensor), "see `reads`"
        dtype = getattr(torch, ref.dtype, None)
        if not isinstance(dtype, torch.dtype) or math.prod(ref.shape) * dtype.itemsize != ref.size_bytes:
            raise TransportError("a tensor handle contradicts itself", f"{ref.dtype}{list(ref.shape)}", peer=ref.owner)
        opened = self._opened.setdefault((ref.owner, ref.generation >> COUNTER_BITS), {})
        if ref.memory not in opened:
            opened[ref.memory] = self._memory.open(ref.memory)
        self._reads[_key(ref)] = self._memory.read(opened[ref.memory] + ref.offset, dtype, tuple(ref.shape))
        self.received_bytes += ref.size_bytes

    def is_ready(self, ref: TensorRef) -> bool:
        """Return whether `take` may be called. Polled; a tensor that was dropped counts as ready."""
        read = self._reads.get(_key(ref))
        try:
            return read is None or read[1].query()
        except TransportError as error:
            del self._reads[_key(ref)]
            self._failed[_key(ref)] = error
            return True

    def failure(self, ref: TensorRef) -> TransportError | None:
        """Return why a tensor that is ready cannot be taken, None if it can."""
        return self._failed.get(_key(ref))

    def take(self, ref: TensorRef) -> Tensor:
        """Return a tensor that was read, for use on the current stream. Raises TransportError if it was not begun."""
        read = self._reads.pop(_key(ref), None)
        if read is None:
            raise TransportError("a tensor of another GPU was not read", str(loan_of(ref)))
        self._memory.take(read[0])
        return read[0]

    def drop(self, ref: TensorRef) -> None:
        """Forget a tensor whose request has ended."""
        self._reads.pop(_key(ref), None)
        self._failed.pop(_key(ref), None)

    @property
    def reading(self) -> int:
        """Number of tensors that were begun and neither taken nor dropped."""
        return len(self._reads)

    # -- the ends ----------------------------------------------------------------------------------------------------

    def reclaim(self, peer: str, incarnation: int) -> int:
        """End the loans of a dead peer and unmap its memory. Returns the number of loans."""
        gone = [(slot, lent) for slot, lent in self._lent.items() if lent.to == peer]
        for slot, lent in gone:
            self.release(slot, lent.generation)
        for key in [key for key in self._opened if key[0] == peer and key[1] <= incarnation]:
            for address in self._opened.pop(key).values():
                self._unmap(address)
        return len(gone)

    def close(self) -> None:
        """Free and unmap everything. Safe to call twice."""
        self._lent.clear()
        self._reads.clear()
        for opened in self._opened.values():
            for address in opened.values():
                self._unmap(address)
        self._opened.clear()
        for segment in self._segments:
            self._memory.free(segment.address)
        self._segments.clear()
        self._memory.close()

    def _unmap(self, address: int) -> None:
        try:
            self._memory.unmap(address)
        except TransportError:
            return  # its process is gone, and its memory with it


def _key(ref: TensorRef) -> tuple[str, int, int]:
    assert isinstance(ref, PeerTensor), "see `PeerMemory.reads`"
    return ref.owner, ref.slot, ref.generation
