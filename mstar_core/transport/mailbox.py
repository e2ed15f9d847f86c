"""Inbox of a process: bound PULL sockets, for its own host and for others, that are drained in batches.

Owned by the main loop of api, conductor, worker and supervisor and used from its thread. The descriptor of a ZMQ socket
is edge-triggered and may stay silent while messages wait, so readers drain until the socket raises Again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq

from mstar_core.closing import Closing
from mstar_core.errors import TransportError
from mstar_core.messages.wire import Envelope, WireCodec
from mstar_core.transport.address import check_path, socket_file
from mstar_core.transport.curve import serve_curve
from mstar_core.transport.numbered import LinkBreak, NumberedLinks
from mstar_core.transport.remote import RemoteAccess, bind_remote
from mstar_core.transport.spin import spin_then_block
from mstar_core.transport.zap import Authenticator

DRAIN_LIMIT = 256  # messages per turn of a loop: 0.3 ms at one microsecond each, so that timers stay on time

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """Stands in the place of a message that could not be decoded."""

    error: str
    size_bytes: int


class Mailbox(Closing):
    """The inbox of one process. endpoint, remote_endpoint: for senders of this host and of others, empty without.

    Messages of one sender arrive in order, because it uses one of the two. If some of another host's sender were lost,
    none that follow arrive, and `drain` calls on_break once.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        codec: WireCodec,
        *,
        queue_messages: int = 1000,
        remote: RemoteAccess | None = None,
    ) -> None:
        """Bind `endpoint`, unless it is empty, and a TCP port for other hosts if there is `remote`.

        queue_messages: high-water mark of ZMQ per sender. Only one mailbox of a context may have `remote`.

        Raises TransportError when the path is too long, taken, or in a directory that others can open, or when no port
        is free.
        """
        self.endpoint = endpoint
        self.remote_endpoint = ""
        self.on_break: Callable[[LinkBreak], None] = lambda lost: log.error("messages were lost: %s", lost)
        self._decode = codec.decode
        self._file: Path | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callback: Callable[[list[Envelope | Malformed]], None] | None = None
        self._again: asyncio.Handle | None = None
        self._watched: dict[int, Callable[[], None]] = {}
        self._is_closed = False
        self._sockets: list[zmq.Socket[bytes]] = []
        self._remote: zmq.Socket[bytes] | None = None  # that of the two
        self._links = NumberedLinks()
        self._poller = zmq.Poller()
        self._authenticator: Authenticator | None = None
        try:
            if endpoint:
                self._bind(context, queue_messages)
            if remote is not None:
                self._bind_remote(context, queue_messages, remote)
        except BaseException:
            self.close()
            raise

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]], queue_messages: int) -> None:
        file = socket_file(self.endpoint)
        if file is not None:
            check_path(file)
        socket = self._open_socket(context, queue_messages)
        self._file = file
        try:
            socket.bind(self.endpoint)
            if file is not None:
                os.chmod(file, 0o600)
        except (zmq.ZMQError, OSError) as error:
            raise TransportError("a mailbox cannot be opened", f"{self.endpoint}: {error}") from error

    def _bind_remote(self, context: zmq.Context[zmq.Socket[bytes]], queue_messages: int, remote: RemoteAccess) -> None:
        self._authenticator = Authenticator(context, remote.accepted_key)
        self._remote = socket = self._open_socket(context, queue_messages)
        serve_curve(socket, remote.keys)
        self.remote_endpoint = bind_remote(socket, remote)

    def _open_socket(self, context: zmq.Context[zmq.Socket[bytes]], queue_messages: int) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.PULL)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, queue_messages)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def drain(self, limit: int = DRAIN_LIMIT) -> list[Envelope | Malformed]:
        """Return up to `limit` waiting messages, those of each sender in order. Also runs the callbacks of `watch`.

        Never blocks and never raises for bad messages. A list of `limit` messages means that more may wait.
        """
        for callback in self._watched.values():
            callback()
        taken: list[Envelope | Malformed] = []
        for socket in self._sockets:
            self._take(socket, taken, limit)
        self._sockets.reverse()  # a full socket leaves the next turn to the other one
        return taken

    def _take(self, socket: zmq.Socket[bytes], taken: list[Envelope | Malformed], limit: int) -> None:
        receive = socket.recv
        try:
            if socket is self._remote:
                while len(taken) < limit:
                    if (item := self._unnumber(receive(zmq.NOBLOCK))) is not None:
                        taken.append(item)
            while len(taken) < limit:
                taken.append(self._open(receive(zmq.NOBLOCK)))
        except zmq.Again:
            pass

    def _unnumber(self, frame: bytes) -> Envelope | Malformed | None:
        """Return the message of a frame of another host, None if it has none to deliver."""
        try:
            data = self._links.take(frame)
        except TransportError as error:
            return Malformed(error=str(error), size_bytes=len(frame))
        while self._links.breaks:
            self.on_break(self._links.breaks.pop())
        return None if data is None else self._open(data)

    def heard(self) -> set[tuple[str, int]]:
        """Return the processes of other hosts, with their incarnations, of which anything came since the last call."""
        return self._links.heard()

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` in each `drain`, and wake the owner's loop while the descriptor is readable.

        The callback must return at once if there is nothing to do, leave the descriptor unreadable, and not raise.
        """
        self._watched[fd] = callback
        self._poller.register(fd, zmq.POLLIN)
        if self._loop is not None:
            self._loop.add_reader(fd, callback)

    def unwatch(self, fd: int) -> None:
        """End `watch`. Safe to call twice."""
        if self._watched.pop(fd, None) is None:
            return
        self._poller.unregister(fd)
        if self._loop is not None:
            self._loop.remove_reader(fd)

    def wait(self, timeout_s: float, *, spin_s: float = 0.0) -> bool:
        """Wait for a message. For loops without asyncio. Returns False on timeout.

        spin_s: time to busy-poll before sleeping (`Spin.left_s`).
        """
        poll = self._poller.poll
        if spin_s <= 0 or timeout_s <= 0:
            return bool(poll(math.ceil(timeout_s * 1000)))
        return spin_then_block(lambda s: bool(poll(math.ceil((s or 0) * 1000))), timeout_s, spin_s, time.monotonic)

    def attach(self, loop: asyncio.AbstractEventLoop, callback: Callable[[list[Envelope | Malformed]], None]) -> None:
        """Call `callback` on `loop` with each batch of messages until `detach`."""
        if self._loop is not None:
            raise TransportError("a mailbox is attached already", self.endpoint)
        self._loop, self._callback = loop, callback
        for socket in self._sockets:
            loop.add_reader(int(socket.getsockopt(zmq.FD)), self._turn)
        for fd, watcher in self._watched.items():
            loop.add_reader(fd, watcher)
        self._again = loop.call_soon(self._turn)  # earlier messages trigger no edge

    def detach(self) -> None:
        """Stop the callbacks. Messages stay in the mailbox. Safe to call twice."""
        if self._loop is None:
            return
        for socket in self._sockets:
            self._loop.remove_reader(int(socket.getsockopt(zmq.FD)))
        for fd in self._watched:
            self._loop.remove_reader(fd)
        if self._again is not None:
            self._again.cancel()
        self._loop = self._callback = self._again = None

    def close(self) -> None:
        """Drop all messages, free the sockets and remove the file. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.detach()
        for socket in self._sockets:
            socket.close(0)
        if self._authenticator is not None:
            self._authenticator.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _turn(self) -> None:
        loop, callback = self._loop, self._callback
        if loop is None or callback is None:
            return
        if self._again is not None:
            self._again.cancel()
            self._again = None
        taken = self.drain()
        if len(taken) == DRAIN_LIMIT:
            self._again = loop.call_soon(self._turn)  # set before the callback, which may raise or detach
        if taken:
            callback(taken)

    def _open(self, data: bytes | memoryview) -> Envelope | Malformed:
        try:
            return self._decode(data)
        except Exception as error:  # noqa: BLE001  isolation boundary: one message
            return Malformed(error=f"{type(error).__name__}: {error}", size_bytes=len(data))
