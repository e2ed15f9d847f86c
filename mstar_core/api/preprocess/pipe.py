"""Pipe between the api and a pool process: messages in shared memory, announced through a socket.

A socket holds about 200 KB, so a camera image sent through it wakes both processes several times, which takes longer
than decoding it. Messages are therefore written into memory that both processes map, and the socket carries only their
size. The api does not trust the other end: `forms` checks every message, a note never blocks its reader, and neither
process can change the size of the memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import struct
from multiprocessing.reduction import DupFd
from typing import Any, Final, Self

from mstar_core.api.preprocess.forms import HEAD_BYTES, InvalidForm, Reader, encoded

MEMORY_BYTES: Final = 2 << 30
"""Largest message, per direction. The memory is sparse: unused pages are not allocated."""

STEP_BYTES: Final = 1 << 20
KEPT_BYTES: Final = 4 << 20
"""Memory that stays allocated after a message was read; the rest is freed."""

NOTE: Final = struct.Struct("!QQ")
"""Size of a message, and of the MessagePack at its end."""


class MessageMemory:
    """Shared memory for one message at a time, written by one process and read by the other."""

    def __init__(self, fd: int | None = None) -> None:
        """fd: existing memory, owned from now on; None: allocate new memory."""
        if fd is None:
            fd = os.memfd_create("mstar-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, MEMORY_BYTES)
            # A process that shrinks the memory would end the reader by SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._fd = fd
        self._memory = mmap.mmap(fd, MEMORY_BYTES)
        self._allocated = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._fd),)  # valid only while a process is spawned

    def dump(self, value: Any) -> tuple[int, int]:
        """Write a message into the memory. Returns its size and that of its MessagePack.

        Raises MemoryError if it does not fit, TypeError for a type without a form.
        """
        self._memory.seek(0)
        try:
            head = encoded(value, self._append)
            self._append(head)
        except BaseException:
            self._free()  # the reader will not see the message
            raise
        self._allocated = min(self._allocated, KEPT_BYTES)  # the reader frees the rest
        return self._memory.tell(), len(head)

    def _append(self, data: Any) -> int:
        start = self._memory.tell()
        end = start + memoryview(data).nbytes
        if end > self._allocated:
            self._allocate(end)
        self._memory.write(data)
        return start

    def _allocate(self, end: int) -> None:
        if end > MEMORY_BYTES:
            raise MemoryError(f"a message of a pool process has more than {MEMORY_BYTES} bytes")
        missing = -(-(end - self._allocated) // STEP_BYTES) * STEP_BYTES
        try:
            os.posix_fallocate(self._fd, self._allocated, missing)  # fails here, instead of by SIGBUS at first access
        except OSError as error:
            raise MemoryError(f"a message of a pool process has no memory: {error.strerror}") from error
        self._allocated += missing

    def load(self, size: int, head_size: int, *, trusts_names: bool) -> Any:
        """Return the message of `size` bytes. Raises InvalidForm."""
        if not 0 < head_size <= size <= MEMORY_BYTES or (head_size > HEAD_BYTES and not trusts_names):
            raise InvalidForm("a message of an invalid size")
        start = size - head_size
        head = self._memory[start:size]  # copied before it is checked: the writer could still change the memory
        with memoryview(self._memory) as view, view[:start] as data:
            value = Reader(data, trusts_names=trusts_names).value(head)
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

    Each end waits for the answer to its message before it sends the next one. is_api: this end is the api's.
    """

    def __init__(self, pipe: socket.socket, to_peer: MessageMemory, from_peer: MessageMemory, *, is_api: bool) -> None:
        self._pipe, self._to_peer, self._from_peer = pipe, to_peer, from_peer
        self._is_api = is_api

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Return the api's end and the other one, which may be an argument of a spawned process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a note arrives whole or not at all
        there, back = MessageMemory(), MessageMemory()
        return cls(ours, there, back, is_api=True), cls(theirs, back, there, is_api=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received_pipe, (DupFd(self._pipe.fileno()), self._to_peer, self._from_peer)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with a message."""
        return self._pipe.fileno()

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait for a message."""
        waiting = select.poll()
        waiting.register(self._pipe, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1000))

    def send(self, value: Any) -> None:
        """Send a message without blocking. Raises MemoryError if it does not fit, TypeError if it has no form."""
        self._pipe.send(NOTE.pack(*self._to_peer.dump(value)))

    def note(self) -> tuple[int, int]:
        """Wait for the sizes of the next message. Does not block once the descriptor is readable."""
        data = self._pipe.recv(NOTE.size)
        if len(data) != NOTE.size:
            raise EOFError
        size, head_size = NOTE.unpack(data)
        return size, head_size

    def load(self, note: tuple[int, int]) -> Any:
        """Return the message of this note. Raises InvalidForm."""
        return self._from_peer.load(*note, trusts_names=not self._is_api)

    def receive(self) -> Any:
        """Wait for a message and return it."""
        return self.load(self.note())

    def close(self, *, is_shared: bool = False) -> None:
        """Close this end. is_shared: the other end in this process uses the same memory. Safe to call twice."""
        self._pipe.close()
        if not is_shared:
            self._to_peer.close()
            self._from_peer.close()


def _received_pipe(pipe: Any, to_peer: MessageMemory, from_peer: MessageMemory) -> PoolPipe:
    return PoolPipe(socket.socket(fileno=pipe.detach()), to_peer, from_peer, is_api=False)
