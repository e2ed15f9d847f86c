"""PUSH and PULL of libzmq, for endpoints that are no file of this host. Used by couriers and mailboxes."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

import zmq

RECONNECT_MS = 20  # a peer that is announced before it is bound is found quickly


class RemotePush:
    """The sending end of one connection. Owned by a courier."""

    is_clear = True

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, queue_messages: int) -> None:
        """Raises zmq.ZMQError for an endpoint that ZMQ refuses."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, queue_messages)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self._socket.close(0)
            raise

    @property
    def waits_for(self) -> zmq.Socket[bytes]:
        """What a poller takes, to write."""
        return self._socket

    def send(self, data: bytes) -> bool:
        """Take a message; False when there is no room."""
        # A non-blocking send may answer Again from a stale view of its queue (ZMQ looks for news only now and then);
        # reading EVENTS always looks, so that alone decides when to stop and wait for the descriptor.
        while True:
            try:
                self._socket.send(data, zmq.NOBLOCK)
            except zmq.Again:
                if not self.flush():
                    return False
            else:
                return True

    def flush(self) -> bool:
        """Whether there is room."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def watch(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        """Call back whenever the descriptor tells news, until `unwatch`."""
        if self._loop is None:
            self._loop = loop
            loop.add_reader(int(self._socket.getsockopt(zmq.FD)), callback)

    def unwatch(self) -> None:
        """Stop calling back. Safe to call twice."""
        if self._loop is not None:
            self._loop.remove_reader(int(self._socket.getsockopt(zmq.FD)))
            self._loop = None

    def close(self, linger_s: float = 0.0) -> None:
        """End the connection. linger_s: how long `Context.term` may still deliver what ZMQ took."""
        self.unwatch()
        self._socket.close(round(linger_s * 1000))


class RemotePull:
    """The receiving end. Owned by a mailbox. frames: messages that were read and not taken yet.

    Its descriptor is edge triggered: it may stay silent while messages wait, so `read` goes on until ZMQ says Again.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, queue_messages: int) -> None:
        """Raises zmq.ZMQError for an endpoint that ZMQ refuses or that is taken."""
        self.frames: deque[bytes] = deque()
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, queue_messages)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._socket.close(0)
            raise

    @property
    def fd(self) -> int:
        """The edge-triggered descriptor."""
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def waits_for(self) -> zmq.Socket[bytes]:
        """What a poller takes, to read."""
        return self._socket

    def wait(self, timeout_s: float) -> bool:
        """Wait for something to read."""
        return bool(self.frames) or bool(self._socket.poll(math.ceil(timeout_s * 1000), zmq.POLLIN))

    def read(self, limit: int) -> None:
        """Read until nothing is left, or `limit` frames wait."""
        try:
            while len(self.frames) < limit:
                self.frames.append(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            pass

    def close(self) -> None:
        """Drop what waits."""
        self._socket.close(0)
