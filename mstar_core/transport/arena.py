"""Shared-memory arena: the memory that a process lends its tensors from, and the mappings of its readers.

Each process has one anonymous file (memfd), sparse up to its limit and filled segment by segment. Readers get its
descriptor once, from a socket, and need no update when it grows. The file has no name, so nothing remains after a
SIGKILL. Layout: a table of one uint64 generation per slot (0: not lent), then the tensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import mmap
import os
import socket
import struct
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mstar_core.closing import Closing
from mstar_core.errors import ArenaFull, TransportError
from mstar_core.messages.tensors import ShmTensor
from mstar_core.transport.address import check_path
from mstar_core.transport.dtypes import Array, check_size, name_of, storage

log = logging.getLogger(__name__)

T = TypeVar("T")


class FreeList:
    """Free extents of an address range: sorted, first fit, merged on return. Sizes and offsets in bytes."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._sizes: dict[int, int] = {}

    @property
    def largest_bytes(self) -> int:
        return max(self._sizes.values(), default=0)

    def tail_bytes(self, end: int) -> int:
        """Return the size of the free extent that ends at `end`, 0 if the last bytes are in use."""
        if not self._offsets:
            return 0
        last = self._offsets[-1]
        return self._sizes[last] if last + self._sizes[last] == end else 0

    def take(self, size: int) -> int | None:
        """Take `size` bytes from the first extent that is large enough. Returns the offset, or None."""
        for index, offset in enumerate(self._offsets):
            free = self._sizes[offset]
            if free < size:
                continue
            del self._sizes[offset]
            if free == size:
                del self._offsets[index]
            else:
                self._offsets[index] = offset + size
                self._sizes[offset + size] = free - size
            return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Return an extent and merge it with its neighbours."""
        index = bisect_left(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] == offset + size:
            size += self._sizes.pop(self._offsets.pop(index))
        if index > 0:
            before = self._offsets[index - 1]
            if before + self._sizes[before] == offset:
                self._sizes[before] += size
                return
        self._offsets.insert(index, offset)
        self._sizes[offset] = size


MIB = 1 << 20
ALIGN_BYTES = 64  # a cache line, and the alignment of torch's own allocations
COUNTER_BITS = 40  # generation = incarnation << 40 | counter: unique for 10^12 loans of each incarnation
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loan:
    offset: int
    size_bytes: int
    generation: int
    to: str


@dataclass(slots=True, kw_only=True)
class Growth:
    """Memory that an arena has claimed and not yet committed. fd: of its own, so that a thread may commit it."""

    offset: int
    size: int
    fd: int
    memory: mmap.mmap
    is_committed: bool = False

    def commit(self) -> OSError | None:
        """Take the memory from the system. Returns the error if there is none. May run in a thread."""
        try:
            os.posix_fallocate(self.fd, self.offset, self.size)  # fails here instead of a SIGBUS at first touch
        except OSError as error:
            return error
        finally:
            os.close(self.fd)
        with contextlib.suppress(OSError, ValueError):  # older kernels map the pages at first touch
            for start in range(0, self.size, MIB):  # in pieces, because the call keeps the interpreter lock
                self.memory.madvise(MADV_POPULATE_WRITE, self.offset + start, min(MIB, self.size - start))
        self.is_committed = True
        return None


class Arena(Closing):
    """Pooled shared memory of one process. Not thread-safe. Owned by its `TensorTransport`."""

    def __init__(
        self,
        owner_name: str,
        *,
        incarnation: int = 0,
        segment_bytes: int = 8 * MIB,
        max_bytes: int = 4096 * MIB,
        slots: int = 16384,
    ) -> None:
        """Create an empty arena; memory is committed with the first tensor or by `reserve`.

        segment_bytes: minimum growth; its pages are allocated at once, about 0.8 ms per MiB. max_bytes: limit for
        tensors. slots: maximum number of open loans.
        """
        self.owner_name = owner_name
        self.segment_bytes = _round_up(segment_bytes, mmap.PAGESIZE)
        self.max_bytes = _round_up(max_bytes, mmap.PAGESIZE)
        table_bytes = _round_up(slots * 8, mmap.PAGESIZE)
        self.size_bytes = table_bytes + self.max_bytes
        self.slots = slots
        self._next_generation = (incarnation << COUNTER_BITS) + 1
        self._base = self._end = table_bytes
        self._free = FreeList()
        self._free_slots = list(range(slots - 1, -1, -1))
        self._loans: dict[int, _Loan] = {}
        self._used_bytes = 0
        self._fd = os.memfd_create(f"mstar-{owner_name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.size_bytes)
            # Seals keep the pages under a reader's mapping, which would otherwise raise SIGBUS.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
            self._memory = mmap.mmap(self._fd, self.size_bytes)
            self.reader_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(self._fd)
            raise TransportError("shared memory cannot be created", str(error)) from error
        self._table = np.frombuffer(self._memory, dtype=np.uint64, count=slots)

    @property
    def used_bytes(self) -> int:
        """Bytes lent to readers."""
        return self._used_bytes

    @property
    def committed_bytes(self) -> int:
        """Committed memory, lent or free."""
        return self._end - self._base

    @property
    def live(self) -> int:
        """Number of tensors lent to readers."""
        return len(self._loans)

    def reserve(self, size_bytes: int) -> None:
        """Commit memory for at least `size_bytes` of tensors now, so that the first ones cause no page faults.

        Raises ArenaFull beyond the limit or without free memory.
        """
        missing = size_bytes - self.committed_bytes
        if missing > 0:
            self._grow(missing)

    def put(self, array: Array, to: str, *, dtype: str | None = None) -> ShmTensor:
        """Copy `array` in and lend it to `to` until `release` or `reclaim`. Any shape and strides.

        dtype: the true element type if numpy lacks it. Raises ArenaFull without side effects, and TransportError for
        an unsupported type.
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
        """End a loan. Returns False if the loan has ended already."""
        loan = self._loans.get(slot)
        if loan is None or loan.generation != generation:
            return False
        self._end_loan(slot, loan)
        return True

    def reclaim(self, peer: str) -> int:
        """End all loans of a dead peer. Returns their number."""
        gone = [(slot, loan) for slot, loan in self._loans.items() if loan.to == peer]
        for slot, loan in gone:
            self._end_loan(slot, loan)
        return len(gone)

    def close(self) -> None:
        """Free the memory; readers keep their mappings. Safe to call twice."""
        if self._memory.closed:
            return
        self._table[:] = 0  # readers that still map it see that all loans have ended
        del self._table
        self._loans.clear()
        self._used_bytes = 0
        self._memory.close()
        os.close(self.reader_fd)
        os.close(self._fd)

    def _take(self, size: int) -> int:
        if self._memory.closed:
            raise TransportError("the shared memory of this process is closed", self.owner_name)
        if not self._free_slots:
            raise self.full(size, f"all {self.slots} slots are lent")
        offset = self._free.take(size)
        if offset is None:
            self._grow(size - self._free.tail_bytes(self._end), needed=size)
            offset = self._free.take(size)
        assert offset is not None, "the arena has grown by enough"
        return offset

    def _lend(self, name: str, array: Array, to: str, offset: int, size: int) -> ShmTensor:
        slot, generation = self._free_slots.pop(), self._next_generation
        self._next_generation += 1
        self._loans[slot] = _Loan(offset=offset, size_bytes=size, generation=generation, to=to)
        self._used_bytes += size
        self._table[slot] = generation  # last: a generation in the table guarantees that the bytes are written
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
        self._table[slot] = 0  # first: stale handles are refused from now on
        del self._loans[slot]
        self._used_bytes -= loan.size_bytes
        self._free.give(loan.offset, loan.size_bytes)
        self._free_slots.append(slot)

    def has_room(self, sizes: Sequence[int]) -> bool:
        """Return whether tensors of these sizes, in bytes, can be lent without more memory."""
        return len(sizes) <= len(self._free_slots) and self._free.largest_bytes >= _room_of(sizes)

    def claim_for(self, sizes: Sequence[int]) -> Growth:
        """Claim memory for tensors of these sizes, so that they fit into one piece. Call `settle` after its `commit`.

        Raises ArenaFull.
        """
        needed = _room_of(sizes)
        if len(sizes) > len(self._free_slots):
            raise self.full(needed, f"{len(self._free_slots)} of {self.slots} slots are free")
        return self._claim(needed - self._free.tail_bytes(self._end), needed)

    def settle(self, growth: Growth) -> None:
        """Take memory that was committed into use, or forget a claim that failed."""
        if growth.is_committed:
            self._free.give(growth.offset, growth.size)
        elif growth.offset + growth.size == self._end:
            self._end = growth.offset

    def _grow(self, missing: int, needed: int | None = None) -> None:
        growth = self._claim(missing, needed or missing)
        error = growth.commit()
        self.settle(growth)
        if error is not None:
            raise self.full(needed or missing, f"the system has no memory: {error.strerror}") from error

    def _claim(self, missing: int, needed: int) -> Growth:
        room = self._base + self.max_bytes - self._end
        if missing > room:
            raise self.full(needed, f"the limit is {self.max_bytes} bytes")
        step = min(_round_up(missing, self.segment_bytes), room)
        growth = Growth(offset=self._end, size=step, fd=os.dup(self._fd), memory=self._memory)
        self._end += step
        return growth

    def full(self, needed: int, why: str) -> ArenaFull:
        """Return the error for tensors that need so many bytes."""
        room = self._base + self.max_bytes - self._end
        free = max(self._free.largest_bytes, self._free.tail_bytes(self._end) + room)
        return ArenaFull(
            "no room for a tensor in shared memory",
            f"{needed} bytes needed, {free} in one piece free, {self._used_bytes} in {self.live} tensors lent; {why}",
            "readers do not return tensors fast enough, or the limit is too small for this model",
            needed=needed,
            free=free,
        )


def _room_of(sizes: Sequence[int]) -> int:
    return sum(_round_up(max(size, 1), ALIGN_BYTES) for size in sizes)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


GREETING = struct.Struct("<QQ")  # size_bytes, slots
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid (unix(7), SO_PEERCRED)
_SEND_TIMEOUT_S = 1.0
_RETRY_S = 0.1


class FdServer:
    """Hands the arena's descriptor to readers of the same user, at the socket `path` (mode 0600).

    It runs on a thread, so that readers never wait for a step of the owner. Each connection gets one greeting with the
    descriptor and is closed.
    """

    def __init__(self, path: Path, arena: Arena) -> None:
        """Start listening. Raises TransportError when the socket cannot be created."""
        self.path = path
        self._fd = arena.reader_fd
        self._greeting = GREETING.pack(arena.size_bytes, arena.slots)
        check_path(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            os.fchmod(self._socket.fileno(), 0o600)  # before bind, so that the file never has another mode
            self._socket.bind(os.fspath(path))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise TransportError("shared memory cannot be offered", f"{path}: {error}") from error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="mstar-arena-fd", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the socket file. Safe to call twice."""
        if self._socket.fileno() == -1:
            return
        self._closing.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # ends accept() on the thread
        self._thread.join()
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closing, or out of descriptors for a while
                self._closing.wait(_RETRY_S)
                continue
            with connection:
                self._greet(connection)

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_SEND_TIMEOUT_S)
            _, uid, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid != os.geteuid():
                return
            socket.send_fds(connection, [self._greeting], [self._fd])
        except OSError as error:  # isolation boundary: one reader
            log.warning("shared memory was not handed to a reader: %s", error)


def fetch(path: Path, timeout_s: float) -> tuple[int, int, int]:
    """Request the arena of the server at `path`. Returns a descriptor, which the caller closes, bytes and slots.

    Raises OSError (TimeoutError included) without an answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        connection.connect(os.fspath(path))
        greeting, fds, _, _ = socket.recv_fds(connection, GREETING.size, 1)
    if len(greeting) != GREETING.size or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise ConnectionResetError(f"{path} did not hand over its shared memory")
    size_bytes, slots = GREETING.unpack(greeting)
    return fds[0], size_bytes, slots


@dataclass(frozen=True, slots=True)
class _Mapping:
    memory: mmap.mmap
    table: npt.NDArray[np.uint64]


@dataclass(slots=True)
class _Owner:
    path: Path
    incarnation: int
    mapping: _Mapping | None = None  # created with the first tensor; most peers never send one


class ArenaReader:
    """Tensors in the arenas of other processes, mapped once and read-only. Owned by `TensorTransport`."""

    def __init__(self, *, timeout_s: float = 2.0) -> None:
        """timeout_s: for the descriptor of a new owner."""
        self._timeout_s = timeout_s
        self._owners: dict[str, _Owner] = {}

    @property
    def mapped(self) -> int:
        """Number of mapped arenas."""
        return sum(owner.mapping is not None for owner in self._owners.values())

    def connect(self, owner: str, path: Path, incarnation: int) -> None:
        """Register the arena of `owner`. A newer incarnation replaces an older one."""
        known = self._owners.get(owner)
        if known is not None and known.incarnation >= incarnation:
            return
        self.forget(owner)
        self._owners[owner] = _Owner(path, incarnation)

    def open(self, ref: ShmTensor) -> Array:
        """Return the tensor in place, read-only. Valid until its loan is returned.

        Raises TransportError when the owner is unknown or gone, or the loan has ended.
        """
        mapping = self._mapping(ref)
        self._check(ref, mapping)
        count = math.prod(ref.shape)
        return np.frombuffer(mapping.memory, storage(ref.dtype), count, ref.offset).reshape(ref.shape)

    def copy(self, ref: ShmTensor, copier: Callable[[Array], T]) -> T:
        """Return what `copier` copies of the tensor. Raises as `open` does, also if the loan ends during the copy."""
        copied = copier(self.open(ref))
        self._check(ref, self._mapping(ref))
        return copied

    def forget(self, owner: str, incarnation: int | None = None) -> None:
        """Unmap the arena of a dead owner. Arrays in use keep their memory.

        incarnation: the one that ended; a newer one stays.
        """
        known = self._owners.get(owner)
        if known is None or (incarnation is not None and known.incarnation > incarnation):
            return
        # The last array in use unmaps the memory. An explicit close would cause a segmentation fault in its readers.
        del self._owners[owner]

    def close(self) -> None:
        """Forget all owners. Safe to call twice."""
        for owner in list(self._owners):
            self.forget(owner)

    def _mapping(self, ref: ShmTensor) -> _Mapping:
        owner = self._owners.get(ref.owner)
        if owner is None:
            raise TransportError(
                "the owner of a tensor is gone", f"no shared memory of {ref.owner} is known here", peer=ref.owner
            )
        if ref.generation >> COUNTER_BITS != owner.incarnation:
            raise self._ended(ref)
        if owner.mapping is None:
            owner.mapping = self._map(ref.owner, owner)
        return owner.mapping

    def _map(self, name: str, owner: _Owner) -> _Mapping:
        try:
            fd, size_bytes, slots = fetch(owner.path, self._timeout_s)
            try:
                memory = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
        except OSError as error:
            raise TransportError(
                "the shared memory of a peer cannot be mapped", f"{name} at {owner.path}: {error}", peer=name
            ) from error
        return _Mapping(memory, np.frombuffer(memory, dtype=np.uint64, count=slots))

    def _check(self, ref: ShmTensor, mapping: _Mapping) -> None:
        check_size(ref.dtype, ref.shape, ref.size_bytes)
        within = mapping.table.nbytes <= ref.offset and ref.offset + ref.size_bytes <= len(mapping.memory)
        if not within or not 0 <= ref.slot < len(mapping.table):
            raise TransportError("a tensor handle points outside its owner's memory", str(ref), peer=ref.owner)
        if int(mapping.table[ref.slot]) != ref.generation:
            raise self._ended(ref)

    @staticmethod
    def _ended(ref: ShmTensor) -> TransportError:
        return TransportError(
            "the loan of a tensor ended before it was read",
            f"slot {ref.slot} of {ref.owner}, generation {ref.generation}",
            peer=ref.owner,
        )
