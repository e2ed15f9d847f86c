"""How the api and a pool process talk: small messages through a pipe, larger ones in memory that both map.

A pipe holds some hundred kilobytes: two processes that hand a camera image over wake each other several times for it,
which took longer than to decode it. What lies in the memory is told by a note in the pipe, so order and end are the
pipe's alone. Messages are written as multiprocessing's own pipes write them; both ends are processes of this project.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import socket
import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Final, Self

SMALL_BYTES: Final = 16 << 10
"""Up to here a message, its kind and its length are written by one call, so that a reader who sees its begin sees all.

Source: multiprocessing.connection, `Connection._send_bytes`.
"""

MEMORY_BYTES: Final = 64 << 20
"""Most that goes through the memory, each way. It is sparse: what no message needed takes no room."""

STEP_BYTES: Final = 1 << 20
KEPT_BYTES: Final = 4 << 20
"""What lies beyond is given back once it is read."""

PROTOCOL: Final = 5
"""Arrays are written from where they are, without a copy before. Source: Python, PEP 574."""

LENGTH: Final = struct.Struct("!i")
NOTE: Final = struct.Struct("!cQ")
ALONE, TOGETHER, IN_MEMORY = b"a", b"t", b"m"


def pickled(value: Any) -> bytes:
    """A message as it goes through the pipe."""
    return bytes(ForkingPickler.dumps(value))


class MessageMemory:
    """Room for one message, written by one process and read by the other. The pipe says when which of them may."""

    def __init__(self, fd: int | None = None) -> None:
        """fd: of memory that is there already; owned from here on."""
        if fd is None:
            fd = os.memfd_create("mstar-pool", os.MFD_CLOEXEC)
            os.ftruncate(fd, MEMORY_BYTES)
        self._fd = fd
        self._memory = mmap.mmap(fd, MEMORY_BYTES)
        self._taken = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._fd),)  # only while its process is spawned

    def dump(self, value: Any) -> int | None:
        """Pickle a message right into the memory. Returns its bytes, or None where there is no room for it."""
        self._memory.seek(0)
        try:
            ForkingPickler(self, PROTOCOL).dump(value)
        except _Full:
            self._give_back()  # nobody will read it
            return None
        except BaseException:
            self._give_back()
            raise
        self._taken = min(self._taken, KEPT_BYTES)  # its reader gives back the rest
        return self._memory.tell()

    def write(self, data: Any) -> None:
        """Append some bytes, for the pickler."""
        end = self._memory.tell() + memoryview(data).nbytes
        if end > self._taken:
            self._take(end)
        self._memory.write(data)

    def _take(self, end: int) -> None:
        if end > MEMORY_BYTES:
            raise _Full
        missing = -(-(end - self._taken) // STEP_BYTES) * STEP_BYTES
        try:
            os.posix_fallocate(self._fd, self._taken, missing)  # an error here, where a touched page would be a SIGBUS
        except OSError as error:
            raise _Full from error
        self._taken += missing

    def load(self, size: int) -> Any:
        """The message of so many bytes, unpickled."""
        with memoryview(self._memory) as view, view[:size] as message:
            value = ForkingPickler.loads(message)
        if size > KEPT_BYTES:
            self._give_back()
        return value

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):  # a kernel that cannot keeps it until the process ends
            self._memory.madvise(mmap.MADV_REMOVE, KEPT_BYTES)
        self._taken = min(self._taken, KEPT_BYTES)

    def close(self) -> None:
        """Unmap it; it is freed when the other process has done so too. Safe to call twice."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self._fd)


class _Full(Exception):
    """A message does not fit, or the system has no memory for it."""


def _received(fd: Any) -> MessageMemory:
    return MessageMemory(fd.detach())


class PoolPipe:
    """One end. Used by one thread at a time. Raises OSError and EOFError when the other end is gone."""

    def __init__(self, pipe: Connection, to_peer: MessageMemory, from_peer: MessageMemory) -> None:
        self._pipe, self._to_peer, self._from_peer = pipe, to_peer, from_peer

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Two ends; either may be an argument of a process that is spawned, and is closed here then."""
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        there, back = MessageMemory(), MessageMemory()
        return cls(ours, there, back), cls(theirs, back, there)

    def fileno(self) -> int:
        """The descriptor that can be read when a message is there."""
        return self._pipe.fileno()

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait for a message."""
        return self._pipe.poll(timeout_s)

    def send(self, value: Any, *, is_alone: bool = True) -> None:
        """Send a message; may wait for the reader where it is not small.

        is_alone: the other end has read all earlier ones, and its answer to this one will be read before the next is
        sent. Only then may the memory be used, this way and back.
        """
        if not (is_alone and self.put(value)):
            self._pipe.send_bytes((ALONE if is_alone else TOGETHER) + pickled(value))

    def put(self, value: Any) -> bool:
        """Send a message that is alone, without waiting. False, and nothing is sent, where the memory is too small."""
        size = self._to_peer.dump(value)
        if size is None:
            return False
        self._pipe.send_bytes(NOTE.pack(IN_MEMORY, size))
        return True

    def send_small(self, messages: Sequence[bytes]) -> None:
        """Send pickled messages that together fit into an empty pipe, without waiting."""
        for message in messages:
            self._pipe.send_bytes((ALONE if len(messages) == 1 else TOGETHER) + message)

    def receive(self) -> tuple[Any, bool]:
        """Wait for a message: what it says, and whether it was alone."""
        data = self._pipe.recv_bytes()
        if data[:1] == IN_MEMORY:
            return self._from_peer.load(NOTE.unpack(data)[1]), True
        return ForkingPickler.loads(memoryview(data)[1:]), data[:1] == ALONE

    def waits_at_most(self, size: int) -> bool:
        """Whether a message of up to `size` bytes lies here, whole: then `receive` is quick. False: none, or larger."""
        peeking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, self._pipe.fileno())  # told, it asks nothing
        try:
            found = peeking.recv(LENGTH.size + NOTE.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return False
        finally:
            peeking.detach()
        if len(found) <= LENGTH.size:
            return False
        length, kind = LENGTH.unpack_from(found)[0], found[LENGTH.size : LENGTH.size + 1]
        if kind == IN_MEMORY:
            return len(found) == LENGTH.size + NOTE.size and int(NOTE.unpack_from(found, LENGTH.size)[1]) <= size
        return 0 < int(length) <= 1 + min(size, SMALL_BYTES)

    def close(self, *, is_shared: bool = False) -> None:
        """Close this end. is_shared: the memory is the other end's too, in this process. Safe to call twice."""
        self._pipe.close()
        if not is_shared:
            self._to_peer.close()
            self._from_peer.close()
