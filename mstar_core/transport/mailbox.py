"""Inbox of a process: a bound PULL socket that is drained in batches.

Owned by the main loop of api, conductor, worker and supervisor and used from its thread. The descriptor of a ZMQ socket
is edge-triggered and may stay silent while messages wait, so readers drain until the socket raises Again.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from mstar_core.closing import Closing
from mstar_core.errors import TransportError
from mstar_core.messages.wire import Envelope, WireCodec
from mstar_core.transport.address import check_path, socket_file
from mstar_core.transport.spin import spin_then_block

DRAIN_LIMIT = 256  # messages per turn of a loop: 0.3 ms at one microsecond each, so that timers stay on time


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """Stands in the place of a message that could not be decoded."""

    error: str
    size_bytes: int


class Mailbox(Closing):
    """The inbox of one process."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, codec: WireCodec, *, queue_messages: int = 1000
    ) -> None:
        """Bind `endpoint`. queue_messages: high-water mark of ZMQ per sender.

        Raises TransportError when the path is too long, taken, or in a directory that others can open.
        """
        self.endpoint = endpoint
        self._decode = codec.decode
        self._file = socket_file(endpoint)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callback: Callable[[list[Envelope | Malformed]], None] | None = None
        self._again: asyncio.Handle | None = None
        if self._file is not None:
            check_path(self._file)
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, queue_messages)
        try:
            self._socket.bind(endpoint)
            if self._file is not None:
                os.chmod(self._file, 0o600)
        except (zmq.ZMQError, OSError) as error:
            self._socket.close(0)
            raise TransportError("a mailbox cannot be opened", f"{endpoint}: {error}") from error
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    @property
    def fd(self) -> int:
        """The edge-triggered descriptor. After each wake-up drain until the list is shorter than its limit."""
        return int(self._socket.getsockopt(zmq.FD))

    def drain(self, limit: int = DRAIN_LIMIT) -> list[Envelope | Malformed]:
        """Return up to `limit` waiting messages in order. Never blocks and never raises for bad messages.

        A list of `limit` messages means that more may wait.
        """
        taken: list[Envelope | Malformed] = []
        receive = self._socket.recv
        try:
            while len(taken) < limit:
                taken.append(self._open(receive(zmq.NOBLOCK)))
        except zmq.Again:
            pass
        return taken

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
        loop.add_reader(self.fd, self._turn)
        self._again = loop.call_soon(self._turn)  # earlier messages trigger no edge

    def detach(self) -> None:
        """Stop the callbacks. Messages stay in the mailbox. Safe to call twice."""
        if self._loop is None:
            return
        self._loop.remove_reader(self.fd)
        if self._again is not None:
            self._again.cancel()
        self._loop = self._callback = self._again = None

    def close(self) -> None:
        """Drop all messages, free the socket and remove its file. Safe to call twice."""
        if self._socket.closed:
            return
        self.detach()
        self._socket.close(0)
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

    def _open(self, data: bytes) -> Envelope | Malformed:
        try:
            return self._decode(data)
        except Exception as error:  # noqa: BLE001  isolation boundary: one message
            return Malformed(error=f"{type(error).__name__}: {error}", size_bytes=len(data))
