"""Sending of messages: one PUSH socket with a bounded queue per peer, of this host or another. No call blocks.

Owned by the main loop of api, conductor, worker and supervisor and used from its thread. A peer that stops reading
loses its own messages and never stalls the loop. Messages that end something are not lost: they wait for room.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import Final, NamedTuple

import zmq

from mstar_core.closing import Closing
from mstar_core.errors import PeerStalled, TransportError
from mstar_core.messages.flow import TensorFreed
from mstar_core.messages.life import Drained
from mstar_core.messages.requests import CancelRequest, RequestFailed, RequestFinished
from mstar_core.messages.wire import Message, WireCodec
from mstar_core.messages.work import CloseRequest, ReleaseSignal, WorkFailed
from mstar_core.ticks import next_tick
from mstar_core.transport.curve import connect_curve
from mstar_core.transport.numbered import NumberedLink
from mstar_core.transport.remote import CurveKeys

RECONNECT_MS = 20  # short, because a peer may be announced before it has bound its socket
QUEUE_MESSAGES = 4000
MESSAGE_BYTES = 16 << 20
REQUEST_BYTES: Final = 64 << 20
"""Limit of a message of the api and the conductor, which may hold the parameters and inputs of a request."""

TCP: Final = "tcp://"
MARK_S: Final = 1.0
"""Time without a message after which a mark follows, by which a peer of another host notices that the last was lost."""

IDLE_MARKS: Final = 5
"""Periods of `MARK_S` after which an idle link repeats its mark: that after the last message may have been lost too."""

ENDINGS: Final = (
    TensorFreed,
    CloseRequest,
    ReleaseSignal,
    CancelRequest,
    RequestFinished,
    RequestFailed,
    WorkFailed,
    Drained,
)
"""Messages that end a loan, a request or a wait. Their loss would hold memory or a client for good, and they mean the
same after later messages, so they wait if the queue of a peer is full."""

MOST_WAITING: Final = 65536
"""Most messages of these kinds that wait for one peer."""


class _Peer(NamedTuple):
    """waiting: messages that end something, for which the queue had no room. link: to a peer of another host."""

    incarnation: int
    socket: zmq.Socket[bytes]
    waiting: deque[bytes]
    link: NumberedLink | None


class Courier(Closing):
    """Sends messages to peers by name, in order per peer, each once. ZMQ's thread delivers them.

    A peer of another host is reached by TCP with CURVE. If its connection breaks, what was on the way is lost, and what
    waits follows on the next connection. Such messages are numbered, so that the peer notices what it lacks. keys: of
    this process for such peers; may be set later.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        codec: WireCodec,
        *,
        queue_messages: int = QUEUE_MESSAGES,
        message_bytes: int = MESSAGE_BYTES,
        keys: CurveKeys | None = None,
    ) -> None:
        """queue_messages: high-water mark of ZMQ per peer. message_bytes: limit of one message."""
        self.keys = keys
        self._context = context
        self._codec = codec
        self._encode = codec.encode
        self._queue_messages = queue_messages
        self._message_bytes = message_bytes
        self._peers: dict[str, _Peer] = {}
        self._ended: dict[str, int] = {}  # highest ended incarnation of each name
        self._next_mark: float | None = None  # None without peers of other hosts
        self._ticks = 0

    @property
    def peers(self) -> dict[str, int]:
        """Names and incarnations of the connected peers."""
        return {name: peer.incarnation for name, peer in self._peers.items()}

    def connect(self, name: str, endpoint: str, incarnation: int, *, server_key: str | None = None) -> bool:
        """Connect to a peer. A higher incarnation replaces a lower one; late announcements are ignored.

        server_key: CURVE public key of a peer at `tcp://`; None: that of the deployment, `keys.public`.

        Returns whether there is a new connection. Raises TransportError for an endpoint that ZMQ rejects.
        """
        known = self._peers.get(name)
        if incarnation <= self._ended.get(name, -1) or (known is not None and incarnation <= known.incarnation):
            return False
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, self._queue_messages)
        try:
            self._dial(socket, endpoint, server_key)
        except (zmq.ZMQError, TransportError) as error:
            socket.close(0)
            raise TransportError("a peer cannot be reached", f"{name} at {endpoint}: {error}", peer=name) from error
        self.disconnect(name)
        link = None
        if endpoint.startswith(TCP):
            link = NumberedLink(self._codec.sender, self._codec.incarnation)
            self._next_mark = self._next_mark or next_tick(time.monotonic(), MARK_S)
        self._peers[name] = _Peer(incarnation, socket, deque(), link)
        return True

    def _dial(self, socket: zmq.Socket[bytes], endpoint: str, server_key: str | None) -> None:
        if not endpoint.startswith(TCP):
            socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            socket.connect(endpoint)
            return
        if self.keys is None:
            raise TransportError("this process has no keys for peers of other hosts")
        connect_curve(socket, endpoint, self.keys, server_key or self.keys.public)

    def disconnect(self, name: str, incarnation: int | None = None) -> None:
        """Drop a connection and its queue. incarnation: the one that ended; a newer one stays connected."""
        peer = self._peers.get(name)
        ended = incarnation if incarnation is not None else (peer.incarnation if peer else -1)
        self._ended[name] = max(ended, self._ended.get(name, -1))
        if peer is not None and peer.incarnation <= ended:
            del self._peers[name]
            peer.socket.close(0)

    def send(self, name: str, message: Message) -> bool:
        """Queue a message. Returns False for an unknown peer.

        Raises PeerStalled when the peer's queue is full and TransportError when the message is too large. Neither
        affects other messages. A message of `ENDINGS` waits for room instead.
        """
        peer = self._peers.get(name)
        if peer is None:
            return False
        data = self._encode(message)
        if len(data) > self._message_bytes:
            raise TransportError(
                "a message is too large to send",
                f"{len(data)} bytes for {name}, the limit is {self._message_bytes}",
                peer=name,
            )
        if peer.waiting:
            _send_waiting(peer)
        if _send_message(peer, data):
            return True
        if isinstance(message, ENDINGS) and len(peer.waiting) < MOST_WAITING:
            peer.waiting.append(data)
            return True
        raise PeerStalled(
            f"{name} does not read its messages",
            f"{self._queue_messages} messages wait, the limit",
            "it is overloaded or stopped; see its log",
            peer=name,
        )

    def send_waiting(self) -> None:
        """Send the messages that wait, as far as there is room, and marks. Call it once a second or more often."""
        for peer in self._peers.values():
            if peer.waiting:
                _send_waiting(peer)
        if self._next_mark is not None and (now := time.monotonic()) >= self._next_mark:
            self._next_mark = next_tick(now, MARK_S)
            self._ticks += 1
            is_idle_tick = self._ticks % IDLE_MARKS == 0
            for peer in self._peers.values():
                if peer.link is not None and peer.link.is_mark_due(is_idle_tick=is_idle_tick):
                    _send(peer.socket, peer.link.mark)

    def close(self, linger_s: float = 0.0) -> None:
        """Close all connections. linger_s: time for `Context.term` to deliver queued messages."""
        for peer in self._peers.values():
            peer.socket.close(round(linger_s * 1000))
        self._peers.clear()


def _send_message(peer: _Peer, data: bytes) -> bool:
    """Send a message without waiting, with a number to another host. Returns False if the queue is full."""
    if peer.link is None:
        return _send(peer.socket, data)
    if not _send(peer.socket, peer.link.frame(data)):
        return False
    peer.link.sent()
    return True


def _send(socket: zmq.Socket[bytes], data: bytes) -> bool:
    """Send without waiting. Returns False if the queue is full."""
    with suppress(zmq.Again):
        socket.send(data, zmq.NOBLOCK)
        return True
    # ZMQ may refuse because of a stale view of its queue, which reading EVENTS updates.
    if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
        with suppress(zmq.Again):
            socket.send(data, zmq.NOBLOCK)
            return True
    return False


def _send_waiting(peer: _Peer) -> None:
    while peer.waiting and _send_message(peer, peer.waiting[0]):
        peer.waiting.popleft()
