"""The shared memory a process lends its tensors from. Owned by its `ShmTransport`; readers map it by `ArenaReader`.

One anonymous file (memfd) per process, sparse up to its limit and filled segment by segment: readers get its
descriptor once and never have to ask again when it grows. It has no name, so nothing can stay behind after a SIGKILL.
Layout: a table of one uint64 generation per slot (0: not lent), then the tensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Self

import numpy as np

from mstar_core.errors import ArenaFull, TransportError
from mstar_core.messages.tensors import ShmTensor
from mstar_core.transport.dtypes import Array, name_of, storage
from mstar_core.transport.extents import FreeList

MIB = 1 << 20
ALIGN_BYTES = 64  # a cache line, and what torch wants of its own allocations
COUNTER_BITS = 40  # generation = incarnation << 40 | counter: unique for 10^12 loans of each life
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaShape:
    """What a reader has to know to map an arena."""

    size_bytes: int
    slots: int

    @property
    def table_bytes(self) -> int:
        return _round_up(self.slots * 8, mmap.PAGESIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loan:
    offset: int
    size_bytes: int
    generation: int
    to: str


class Arena:
    """Pooled shared memory of one process. Not thread safe: used by the loop that owns it."""

    def __init__(
        self,
        owner_name: str,
        *,
        incarnation: int = 0,
        segment_bytes: int = 8 * MIB,
        max_bytes: int = 4096 * MIB,
        slots: int = 16384,
    ) -> None:
        """Make an empty arena; memory is taken with the first tensor, or ahead of it by `reserve`.

        segment_bytes: how much it grows by at least; the pages are made then, about 0.8 ms a MiB. max_bytes: room for
        tensors. slots: how many may be lent at a time.
        """
        self.owner_name = owner_name
        self.segment_bytes = _round_up(segment_bytes, mmap.PAGESIZE)
        self.max_bytes = _round_up(max_bytes, mmap.PAGESIZE)
        table_bytes = _round_up(slots * 8, mmap.PAGESIZE)
        self.shape = ArenaShape(size_bytes=table_bytes + self.max_bytes, slots=slots)
        self.stale_releases = 0
        self._next_generation = (incarnation << COUNTER_BITS) + 1
        self._base = self._end = table_bytes
        self._free = FreeList()
        self._free_slots = list(range(slots - 1, -1, -1))
        self._loans: dict[int, _Loan] = {}
        self._used_bytes = 0
        self._fd = os.memfd_create(f"mstar-{owner_name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.shape.size_bytes)
            # A reader's mapping must never lose its pages (SIGBUS), whatever happens here.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
            self._memory = mmap.mmap(self._fd, self.shape.size_bytes)
            self.reader_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(self._fd)
            raise TransportError("shared memory cannot be made", str(error)) from error
        self._table = np.frombuffer(self._memory, dtype=np.uint64, count=slots)

    @property
    def used_bytes(self) -> int:
        """Bytes lent to readers."""
        return self._used_bytes

    @property
    def committed_bytes(self) -> int:
        """Memory that the arena holds, lent or free."""
        return self._end - self._base

    @property
    def live(self) -> int:
        """Tensors lent to readers."""
        return len(self._loans)

    def lent_to(self, peer: str) -> int:
        """Return how many tensors `peer` has not given back."""
        return sum(loan.to == peer for loan in self._loans.values())

    def reserve(self, size_bytes: int) -> None:
        """Take memory for at least `size_bytes` of tensors now, so that the first ones do not pay for page faults.

        Raises ArenaFull when that is over the limit or the machine has no memory.
        """
        missing = size_bytes - self.committed_bytes
        if missing > 0:
            self._grow(missing)

    def put(self, array: Array, to: str, *, dtype: str | None = None) -> ShmTensor:
        """Copy `array` in and lend it to `to` until `release` or `reclaim`. Any shape and strides.

        dtype: the true element type where numpy cannot say it. Raises ArenaFull (nothing changes), TransportError for
        a type that cannot be sent.
        """
        name = name_of(array, dtype)
        size = _round_up(max(array.nbytes, 1), ALIGN_BYTES)
        offset = self._take(size)
        try:
            target: Array = np.ndarray(array.shape, storage(name), buffer=self._memory, offset=offset)
            np.copyto(target, array)
        except BaseException:
            self._free.give(offset, size)
            raise
        return self._lend(name, array, to, offset, size)

    def release(self, slot: int, generation: int) -> bool:
        """Take a tensor back. Returns False, and counts it, when that loan has ended already."""
        loan = self._loans.get(slot)
        if loan is None or loan.generation != generation:
            self.stale_releases += 1
            return False
        self._end_loan(slot, loan)
        return True

    def reclaim(self, peer: str) -> int:
        """Take back all that a peer had, when it is dead for certain. Returns how many tensors."""
        gone = [(slot, loan) for slot, loan in self._loans.items() if loan.to == peer]
        for slot, loan in gone:
            self._end_loan(slot, loan)
        return len(gone)

    def close(self) -> None:
        """Give the memory up; it lives on in readers that still map it. Safe to call twice."""
        if self._memory.closed:
            return
        self._table[:] = 0  # readers that still map it learn that nothing is lent any more
        del self._table
        self._loans.clear()
        self._used_bytes = 0
        self._memory.close()
        os.close(self.reader_fd)
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, size: int) -> int:
        if self._memory.closed:
            raise TransportError("the shared memory of this process is closed", self.owner_name)
        if not self._free_slots:
            raise self._full(size, f"all {self.shape.slots} slots are lent")
        offset = self._free.take(size)
        if offset is None:
            self._grow(size - self._free.tail_bytes(self._end), needed=size)
            offset = self._free.take(size)
        assert offset is not None, "a grown arena holds what it grew for"
        return offset

    def _lend(self, name: str, array: Array, to: str, offset: int, size: int) -> ShmTensor:
        slot, generation = self._free_slots.pop(), self._next_generation
        self._next_generation += 1
        self._loans[slot] = _Loan(offset=offset, size_bytes=size, generation=generation, to=to)
        self._used_bytes += size
        self._table[slot] = generation  # last: a generation in the table means that the bytes are there
        return ShmTensor(
            dtype=name,
            shape=array.shape,
            owner=self.owner_name,
            offset=offset,
            size_bytes=array.nbytes,
            slot=slot,
            generation=generation,
        )

    def _end_loan(self, slot: int, loan: _Loan) -> None:
        self._table[slot] = 0  # first: from here on a stale handle is refused
        del self._loans[slot]
        self._used_bytes -= loan.size_bytes
        self._free.give(loan.offset, loan.size_bytes)
        self._free_slots.append(slot)

    def _grow(self, missing: int, needed: int | None = None) -> None:
        room = self._base + self.max_bytes - self._end
        if missing > room:
            raise self._full(needed or missing, f"{self.max_bytes} bytes is the limit")
        step = min(_round_up(missing, self.segment_bytes), room)
        try:
            os.posix_fallocate(self._fd, self._end, step)  # an error here, where a touched page would be a SIGBUS
        except OSError as error:
            raise self._full(needed or missing, f"the system gave no memory: {error.strerror}") from error
        with contextlib.suppress(OSError):  # older kernels: the pages are there, only mapped at first touch
            self._memory.madvise(MADV_POPULATE_WRITE, self._end, step)
        self._free.give(self._end, step)
        self._end += step

    def _full(self, needed: int, why: str) -> ArenaFull:
        room = self._base + self.max_bytes - self._end
        free = max(self._free.largest_bytes, self._free.tail_bytes(self._end) + room)
        return ArenaFull(
            "no room for a tensor in shared memory",
            f"{needed} bytes needed, {free} in one piece free, {self._used_bytes} in {self.live} tensors lent; {why}",
            "readers do not give tensors back fast enough, or the limit is too small for this model",
            needed=needed,
            free=free,
        )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
