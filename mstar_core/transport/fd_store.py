"""Store of descriptors: a process leaves copies of its connections with its supervisor, for its successor.

The two ends share a Unix socket that one inherits from the other, so that no name exists in the file system. A copy
keeps a connection open when the process that uses it is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple

_MESSAGE: Final = struct.Struct("=cQ")
KEEP, DROP, END = b"k", b"d", b"e"
FDS: Final = 2

log = logging.getLogger(__name__)


class Kept(NamedTuple):
    """A connection and its memory file. key: chosen by the process that left them."""

    key: int
    connection: int
    memory: int

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.connection)
        os.close(self.memory)


class _Channel:
    """One end of the socket. Messages that do not fit into it wait; their descriptors are copied meanwhile."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()

    def send(self, kind: bytes, key: int, fds: tuple[int, ...] = ()) -> None:
        """Send one message, now or as soon as there is room."""
        message = _MESSAGE.pack(kind, key)
        if not self._waiting and self._try(message, fds):
            return
        self._waiting.append((message, tuple(map(os.dup, fds))))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().add_writer(self.sock, self._flush)

    def receive(self) -> tuple[bytes, int, list[int]] | None:
        """Return the next message, None if there is none. Raises EOFError at the end, and OSError."""
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, _MESSAGE.size, FDS, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return None
        if len(data) != _MESSAGE.size:
            raise EOFError
        kind, key = _MESSAGE.unpack(data)
        return kind, key, list(fds)

    def close(self) -> None:
        """Close the socket and drop what waits. Safe to call twice."""
        if self.sock.fileno() < 0:
            return
        with suppress(RuntimeError):  # without a running loop nothing was added
            loop = asyncio.get_running_loop()
            loop.remove_reader(self.sock)
            loop.remove_writer(self.sock)
        self.sock.close()
        for _, fds in self._waiting:
            _close_all(fds)
        self._waiting.clear()

    def _try(self, message: bytes, fds: tuple[int, ...]) -> bool:
        try:
            socket.send_fds(self.sock, [message], fds)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:  # the other process has ended, or too many descriptors are under way
            log.debug("a message about a connection was not sent: %s", error)
        return True

    def _flush(self) -> None:
        while self._waiting:
            message, fds = self._waiting[0]
            if not self._try(message, fds):
                return
            self._waiting.popleft()
            _close_all(fds)
        asyncio.get_running_loop().remove_writer(self.sock)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class FdStore:
    """The end that keeps. Owned by the supervisor; holds descriptors between two processes and beside one."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}
        self._channel: _Channel | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def offer(self) -> int:
        """Return the descriptor of a socket for the next process, which gets everything that is kept.

        The caller closes it once the process has inherited it. Needs a running loop.
        """
        self._leave()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = _Channel(ours)
        for kept in self._kept.values():
            self._channel.send(KEEP, kept.key, (kept.connection, kept.memory))
        self._channel.send(END, len(self._kept))
        asyncio.get_running_loop().add_reader(ours, self._read, self._channel)
        return theirs.detach()

    def close(self) -> None:
        """Close everything that is kept, which ends the connections. Safe to call twice."""
        self._leave()
        for kept in self._kept.values():
            kept.close()
        self._kept.clear()

    def _leave(self) -> None:
        """Read what the last process has sent, and close its socket."""
        if self._channel is not None:
            self._read(self._channel)
            self._channel.close()
            self._channel = None

    def _read(self, channel: _Channel) -> None:
        try:
            while (message := channel.receive()) is not None:
                self._on(*message)
        except (EOFError, OSError):
            channel.close()

    def _on(self, kind: bytes, key: int, fds: list[int]) -> None:
        if kind == KEEP and len(fds) == FDS and key not in self._kept:
            self._kept[key] = Kept(key, *fds)
            return
        _close_all(fds)
        if kind == DROP and (kept := self._kept.pop(key, None)) is not None:
            kept.close()


class FdStoreClient:
    """The end of the process that leaves its connections. Owned by the api. Closing it keeps what was left."""

    def __init__(self, sock: socket.socket, incarnation: int) -> None:
        """sock: inherited from the supervisor. incarnation: makes keys unique over all processes."""
        self._channel = _Channel(sock)
        self._next = incarnation << 40

    def keep(self, connection: int, memory: int) -> int:
        """Leave copies of both descriptors. Returns their key."""
        self._next += 1
        self._channel.send(KEEP, self._next, (connection, memory))
        return self._next

    def drop(self, key: int) -> None:
        """Give up what was left under a key, after the end of the connection."""
        self._channel.send(DROP, key)

    async def take(self) -> list[Kept]:
        """Return what an earlier process left. It stays in the store until `drop`. The caller closes the descriptors.

        Called once, before `keep`.
        """
        loop = asyncio.get_running_loop()
        taken: list[Kept] = []
        done: asyncio.Future[None] = loop.create_future()

        def read() -> None:
            try:
                while not done.done() and (message := self._channel.receive()) is not None:
                    kind, key, fds = message
                    if kind == KEEP and len(fds) == FDS:
                        taken.append(Kept(key, *fds))
                        continue
                    _close_all(fds)
                    if kind == END:
                        done.set_result(None)
            except (EOFError, OSError):
                done.set_result(None)

        loop.add_reader(self._channel.sock, read)
        try:
            await done
        finally:
            loop.remove_reader(self._channel.sock)
        return taken

    def close(self) -> None:
        """Close the socket. What was left stays with the supervisor. Safe to call twice."""
        self._channel.close()
