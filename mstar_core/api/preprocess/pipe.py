"""Pipe between the api and a pool process: messages in shared memory, announced through a pipe.

A pipe holds about 100 KB, so a camera image sent through it wakes both processes several times, which takes longer than
decoding it. Messages are therefore pickled into memory that both processes map, and the pipe carries only their size.
Both ends run code of this project.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import struct
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Final, Self

MEMORY_BYTES: Final = 2 << 30
"""Largest message, per direction. The memory is sparse: unused pages are not allocated."""

STEP_BYTES: Final = 1 << 20
KEPT_BYTES: Final = 4 << 20
"""Memory that stays allocated after a message was read; the rest is freed."""

PROTOCOL: Final = 5
"""Pickle protocol that writes arrays without an intermediate copy. Source: PEP 574."""

NOTE: Final = struct.Struct("!Q")


class MessageMemory:
    """Shared memory for one message at a time, written by one process and read by the other."""

    def __init__(self, fd: int | None = None) -> None:
        """fd: existing memory, owned from now on; None: allocate new memory."""
        if fd is None:
            fd = os.memfd_create("mstar-pool", os.MFD_CLOEXEC)
            os.ftruncate(fd, MEMORY_BYTES)
        self._fd = fd
        self._memory = mmap.mmap(fd, MEMORY_BYTES)
        self._allocated = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._fd),)  # valid only while a process is spawned

    def dump(self, value: Any) -> int:
        """Pickle a message into the memory. Returns its size. Raises MemoryError if it does not fit."""
        self._memory.seek(0)
        try:
            ForkingPickler(self, PROTOCOL).dump(value)
        except BaseException:
            self._free()  # the reader will not see the message
            raise
        self._allocated = min(self._allocated, KEPT_BYTES)  # the reader frees the rest
        return self._memory.tell()

    def write(self, data: Any) -> None:
        """Append some bytes. Called by the pickler."""
        end = self._memory.tell() + memoryview(data).nbytes
        if end > self._allocated:
            self._allocate(end)
        self._memory.write(data)

    def _allocate(self, end: int) -> None:
        if end > MEMORY_BYTES:
            raise MemoryError(f"a message of a pool process has more than {MEMORY_BYTES} bytes")
        missing = -(-(end - self._allocated) // STEP_BYTES) * STEP_BYTES
        try:
            os.posix_fallocate(self._fd, self._allocated, missing)  # fails here, instead of by SIGBUS at first access
        except OSError as error:
            raise MemoryError(f"a message of a pool process has no memory: {error.strerror}") from error
        self._allocated += missing

    def load(self, size: int) -> Any:
        """Unpickle the message of `size` bytes."""
        with memoryview(self._memory) as view, view[:size] as message:
            value = ForkingPickler.loads(message)
        if size > KEPT_BYTES:
            self._free()
        return value

    def _free(self) -> None:
        with contextlib.suppress(OSError):  # a kernel without support keeps the memory until the process ends
            self._memory.madvise(mmap.MADV_REMOVE, KEPT_BYTES)
        self._allocated = min(self._allocated, KEPT_BYTES)

    def close(self) -> None:
        """Unmap the memory; it is freed when both processes have done so. Safe to call twice."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self._fd)


def _received(fd: Any) -> MessageMemory:
    return MessageMemory(fd.detach())


class PoolPipe:
    """One end of the pipe. Used by one thread at a time. Raises OSError and EOFError if the other end is gone.

    Each end waits for the answer to its message before it sends the next one.
    """

    def __init__(self, pipe: Connection, to_peer: MessageMemory, from_peer: MessageMemory) -> None:
        self._pipe, self._to_peer, self._from_peer = pipe, to_peer, from_peer

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Return both ends. One may be an argument of a spawned process, and is then closed here."""
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        there, back = MessageMemory(), MessageMemory()
        return cls(ours, there, back), cls(theirs, back, there)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with a message."""
        return self._pipe.fileno()

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait for a message."""
        return self._pipe.poll(timeout_s)

    def send(self, value: Any) -> None:
        """Send a message without blocking. Raises MemoryError if it does not fit into the memory."""
        self._pipe.send_bytes(NOTE.pack(self._to_peer.dump(value)))

    def note(self) -> int:
        """Wait for the size of the next message. Does not block once the descriptor is readable."""
        size: int = NOTE.unpack(self._pipe.recv_bytes())[0]
        return size

    def load(self, size: int) -> Any:
        """Return the message of this size."""
        return self._from_peer.load(size)

    def receive(self) -> Any:
        """Wait for a message and return it."""
        return self.load(self.note())

    def close(self, *, is_shared: bool = False) -> None:
        """Close this end. is_shared: the other end in this process uses the same memory. Safe to call twice."""
        self._pipe.close()
        if not is_shared:
            self._to_peer.close()
            self._from_peer.close()
