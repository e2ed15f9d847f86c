"""What a process sends: one PUSH socket and one bounded outbox per peer. Nothing here ever blocks.

Owned by the main loop of api, conductor, worker and supervisor, used from that one thread. A peer that stops reading
costs the messages meant for it, never the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

import zmq

from mstar_core.errors import PeerStalled, TransportError
from mstar_core.transport.codec import Encodes

M = TypeVar("M")

RECONNECT_MS = 20  # a peer that is announced before it is bound is found quickly


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxLimits:
    """How much may wait for one peer.

    messages, size_bytes: in the outbox. queue_messages: inside ZMQ, before the outbox is used at all.
    message_bytes: the largest single message.
    """

    messages: int = 10_000
    size_bytes: int = 64 << 20
    queue_messages: int = 1000
    message_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """What waits in a peer's outbox."""

    messages: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class CourierCounters:
    """Since the start of the process. Read by telemetry, written by `Courier` alone."""

    sent: int = 0  # handed to ZMQ
    delayed: int = 0  # went through an outbox
    unknown_peer: int = 0  # dropped: nobody of that name
    peer_down: int = 0  # dropped from an outbox when its peer went
    stalled: int = 0  # refused: outbox full


@dataclass(slots=True)
class _Peer:
    """A connection. Invariant: while `outbox` holds something, ZMQ was last seen without POLLOUT."""

    name: str
    incarnation: int
    socket: zmq.Socket[bytes]
    outbox: deque[bytes] = field(default_factory=deque)
    outbox_bytes: int = 0
    watched: bool = False

    @property
    def fd(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))


class Courier(Generic[M]):
    """Sends messages to peers by name, in order per peer, each once."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], codec: Encodes[M], limits: OutboxLimits | None = None
    ) -> None:
        self.limits = limits or OutboxLimits()
        self.counters = CourierCounters()
        self._context = context
        self._encode = codec.encode
        self._peers: dict[str, _Peer] = {}
        self._ended: dict[str, int] = {}  # highest incarnation of each name that is known to be gone
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def peers(self) -> dict[str, int]:
        """Names and incarnations of the connected peers."""
        return {name: peer.incarnation for name, peer in self._peers.items()}

    def connect(self, name: str, endpoint: str, incarnation: int) -> bool:
        """Connect to a peer. A higher incarnation replaces a lower one; an announcement that is late is ignored.

        Returns whether a new connection was made. Raises TransportError for an endpoint that ZMQ refuses.
        """
        known = self._peers.get(name)
        if incarnation <= self._ended.get(name, -1) or (known is not None and incarnation <= known.incarnation):
            return False
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, self.limits.queue_messages)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise TransportError("a peer cannot be reached", f"{name} at {endpoint}: {error}", peer=name) from error
        self.disconnect(name)
        self._peers[name] = _Peer(name, incarnation, socket)
        return True

    def disconnect(self, name: str, incarnation: int | None = None) -> int:
        """Drop the connection and all that waits for it. Returns how many messages its outbox lost.

        incarnation: the life that ended; a newer one that is connected by now stays.
        """
        peer = self._peers.get(name)
        ended = incarnation if incarnation is not None else (peer.incarnation if peer else -1)
        self._ended[name] = max(ended, self._ended.get(name, -1))
        if peer is None or peer.incarnation > ended:
            return 0
        del self._peers[name]
        return self._drop(peer)

    def send(self, name: str, message: M) -> bool:
        """Send now, or keep in the outbox. Returns False when there is no such peer (counted).

        Raises PeerStalled when the peer's outbox is full and TransportError when the message is too large; in both
        cases this message is not sent and the others are not touched.
        """
        peer = self._peers.get(name)
        if peer is None:
            self.counters.unknown_peer += 1
            return False
        data = self._encode(message)
        if len(data) > self.limits.message_bytes:
            raise TransportError(
                "a message is too large to send",
                f"{len(data)} bytes for {name}, the limit is {self.limits.message_bytes}",
                peer=name,
            )
        if peer.outbox:
            self._flush(peer)
        if peer.outbox or not self._push(peer, data):
            self._keep(peer, data)
        return True

    def flush(self) -> int:
        """Try again what waits. Returns how many messages still wait. Cheap when nothing does."""
        return sum(self._flush(peer) for peer in self._peers.values() if peer.outbox)

    def pending(self, name: str) -> Pending:
        """Return what waits in the outbox of `name`; zeros for an unknown peer."""
        peer = self._peers.get(name)
        return Pending(messages=len(peer.outbox), size_bytes=peer.outbox_bytes) if peer else Pending()

    def blocked(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets whose outboxes wait for room, for `Mailbox.wait`."""
        return [peer.socket for peer in self._peers.values() if peer.outbox]

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let `loop` flush each outbox as soon as its peer reads again, until `detach`."""
        self._loop = loop
        for peer in self._peers.values():
            if peer.outbox:
                self._watch(peer)

    def detach(self) -> None:
        """Leave the loop. Outboxes keep what they hold. Safe to call twice."""
        for peer in self._peers.values():
            self._unwatch(peer)
        self._loop = None

    def close(self, linger_s: float = 0.0) -> None:
        """Close all connections. linger_s: how long `Context.term` may still deliver what ZMQ took."""
        for peer in self._peers.values():
            self._flush(peer)
            self._drop(peer, linger_ms=round(linger_s * 1000))
        self._peers.clear()
        self._loop = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _push(self, peer: _Peer, data: bytes) -> bool:
        try:
            peer.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.counters.sent += 1
        return True

    def _keep(self, peer: _Peer, data: bytes) -> None:
        limits = self.limits
        if len(peer.outbox) >= limits.messages or peer.outbox_bytes + len(data) > limits.size_bytes:
            self.counters.stalled += 1
            raise PeerStalled(
                f"{peer.name} does not read its messages",
                f"{len(peer.outbox)} messages, {peer.outbox_bytes} bytes wait "
                f"(limits {limits.messages}, {limits.size_bytes})",
                "it is overloaded or stopped; see its log",
                peer=peer.name,
            )
        peer.outbox.append(data)
        peer.outbox_bytes += len(data)
        self.counters.delayed += 1
        self._flush(peer)  # room may have come since the refusal: restores the invariant

    def _flush(self, peer: _Peer) -> int:
        # A non-blocking send may answer Again from a stale view of its queue (ZMQ looks for news only now and then);
        # reading EVENTS always looks, so that alone decides when to stop and wait for the descriptor.
        while peer.outbox and int(peer.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            while peer.outbox and self._push(peer, peer.outbox[0]):
                peer.outbox_bytes -= len(peer.outbox.popleft())
        if peer.outbox:
            self._watch(peer)
        else:
            self._unwatch(peer)
        return len(peer.outbox)

    def _watch(self, peer: _Peer) -> None:
        if self._loop is not None and not peer.watched:
            self._loop.add_reader(peer.fd, self._flush, peer)
            peer.watched = True

    def _unwatch(self, peer: _Peer) -> None:
        if self._loop is not None and peer.watched:
            self._loop.remove_reader(peer.fd)
        peer.watched = False

    def _drop(self, peer: _Peer, linger_ms: int = 0) -> int:
        self._unwatch(peer)
        peer.socket.close(linger_ms)
        self.counters.peer_down += len(peer.outbox)
        return len(peer.outbox)
