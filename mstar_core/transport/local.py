"""PUSH and PULL between processes of one host, over unix sockets and without threads. Used by couriers and mailboxes.

Cost model: a send is one system call that wakes the receiver; a receive is one look at the descriptors and one read for
each sender that has something. Nothing here blocks.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mstar_core.transport import zmtp

RETRY_S: Final = 0.02
"""How soon a peer that is announced before it is bound is looked for again, where a loop waits for it."""

READ_BYTES: Final = 256 << 10
BACKLOG: Final = 512
PUSH_HELLO: Final = zmtp.GREETING + zmtp.ready(b"PUSH")
PULL_HELLO: Final = zmtp.GREETING + zmtp.ready(b"PULL")


class LocalPush:
    """The sending end of one connection. Owned by a courier.

    A message is taken whole: what the system does not take of it is kept here and goes before the next. Without the
    peer's socket nothing is taken, and each send looks for it again. What the peer says is never read: it is one hello.
    """

    def __init__(self, path: Path) -> None:
        self._path = os.fspath(path)
        self._socket: socket.socket | None = None
        self._rest: memoryview | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._connect()

    @property
    def is_clear(self) -> bool:
        """Whether no part of a message is kept here."""
        return self._rest is None

    @property
    def waits_for(self) -> int | None:
        """The descriptor that can be written to when there is room; None while there is no connection."""
        return None if self._socket is None else self._socket.fileno()

    def send(self, data: bytes) -> bool:
        """Take a message; False when there is no room, or nobody there yet."""
        if not self.flush():
            return False
        header = zmtp.header(len(data))
        taken = self._write([header, data])
        if taken is None:
            return False
        if taken < len(header):  # the system takes a byte at least, and rarely so few
            self._rest = memoryview(header + data)[taken:]
        elif taken < len(header) + len(data):
            self._rest = memoryview(data)[taken - len(header) :]
        return True

    def flush(self) -> bool:
        """Go on with what is kept. True when there is a connection that may take more."""
        if self._socket is None and not self._connect():
            return False
        while self._rest is not None:
            taken = self._write([self._rest])
            if taken is None:
                return False
            self._rest = self._rest[taken:] if taken < len(self._rest) else None
        return True

    def watch(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        """Call back when it is worth another try, until `unwatch`; once where there is no connection."""
        if self._loop is not None:
            return
        if self._socket is not None:
            self._loop = loop
            loop.add_writer(self._socket, callback)
        elif self._timer is None or self._timer.when() <= loop.time():
            self._timer = loop.call_later(RETRY_S, callback)

    def unwatch(self) -> None:
        """Stop calling back. Safe to call twice."""
        if self._loop is not None and self._socket is not None:
            self._loop.remove_writer(self._socket)
        if self._timer is not None:
            self._timer.cancel()
        self._loop = self._timer = None

    def close(self, linger_s: float = 0.0) -> None:
        """End the connection; what was sent is delivered. linger_s: for the rest of a message."""
        if self._socket is not None and self._rest is not None and linger_s > 0:
            self._socket.settimeout(linger_s)
            try:
                self._socket.sendall(self._rest)
            except OSError:
                pass  # it does not read, or is gone: the message is lost as any that waited
        self._lose()

    def _connect(self) -> bool:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.setblocking(False)
        try:
            made.connect(self._path)
            made.send(PUSH_HELLO)  # fits: nothing was sent before
        except OSError:  # not bound yet, or gone: its announcements say which
            made.close()
            return False
        self.unwatch()
        self._socket = made
        return True

    def _write(self, parts: list[bytes | memoryview]) -> int | None:
        """Bytes that the system took, None for no room. A peer that is gone loses its connection."""
        assert self._socket is not None
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return None
        except OSError:
            self._lose()
            return None

    def _lose(self) -> None:
        self.unwatch()
        self._rest = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class LocalPull:
    """The receiving end: one listening socket and a connection per sender. Owned by a mailbox.

    frames: messages that were read and not taken yet, those of one sender in order.
    """

    def __init__(self, path: Path) -> None:
        """Bind `path` with mode 0600. Raises OSError."""
        self.frames: deque[bytes] = deque()
        self._senders: dict[int, tuple[socket.socket, bytearray]] = {}
        self._greeted: set[int] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(self._listener.fileno(), 0o600)  # before bind: the file never has another mode
            self._listener.bind(os.fspath(path))
            self._listener.listen(BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    @property
    def fd(self) -> int:
        """Readable for as long as something is left to read."""
        return self._epoll.fileno()

    @property
    def waits_for(self) -> int:
        """What a poller takes."""
        return self._epoll.fileno()

    def wait(self, timeout_s: float) -> bool:
        """Wait for something to read."""
        return bool(self.frames) or bool(self._epoll.poll(timeout_s, 1))

    def read(self, limit: int) -> None:
        """Read once from every sender that has something, unless `limit` frames wait already."""
        if len(self.frames) >= limit:
            return
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            else:
                self._receive(fd)

    def close(self) -> None:
        """Close every connection; what was not read is lost."""
        for sender, _ in self._senders.values():
            sender.close()
        self._senders.clear()
        self._epoll.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            sender, _ = self._listener.accept()
        except OSError:  # it went again, or there are no descriptors: then it is tried at the next turn
            return
        sender.setblocking(False)
        try:
            sender.send(PULL_HELLO)
        except OSError:
            pass  # it may have sent and gone: what it sent still counts
        self._senders[sender.fileno()] = (sender, bytearray())
        self._epoll.register(sender, select.EPOLLIN)
        self._receive(sender.fileno())

    def _receive(self, fd: int) -> None:
        sender, buffer = self._senders[fd]
        try:
            data = sender.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        buffer += data
        try:
            if self._is_greeted(fd, buffer):
                zmtp.cut(buffer, self.frames)
        except zmtp.NotZmtp:  # isolation boundary: one sender
            data = b""
        if not data:
            self._epoll.unregister(sender)
            sender.close()
            del self._senders[fd]
            self._greeted.discard(fd)

    def _is_greeted(self, fd: int, buffer: bytearray) -> bool:
        if fd in self._greeted:
            return True
        if len(buffer) < zmtp.GREETING_BYTES:
            return False
        zmtp.check_greeting(bytes(buffer[: zmtp.GREETING_BYTES]))
        del buffer[: zmtp.GREETING_BYTES]
        self._greeted.add(fd)
        return True
