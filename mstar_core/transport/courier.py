"""Sending of messages: one PUSH socket and one bounded outbox per peer. No call blocks.

Owned by the main loop of api, conductor, worker and supervisor and used from its thread. A peer that stops reading
loses its own messages and never stalls the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import zmq

from mstar_core.closing import Closing
from mstar_core.errors import PeerStalled, TransportError

M = TypeVar("M")
Sent_contra = TypeVar("Sent_contra", contravariant=True)

RECONNECT_MS = 20  # short, because a peer may be announced before it has bound its socket


class Encodes(Protocol[Sent_contra]):
    """The sending half of a codec."""

    def encode(self, message: Sent_contra, /) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxLimits:
    """Limits of the backlog of one peer.

    messages, size_bytes: in the outbox. queue_messages: in ZMQ, which fills first. message_bytes: of one message.
    """

    messages: int = 10_000
    size_bytes: int = 64 << 20
    queue_messages: int = 1000
    message_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Messages in a peer's outbox."""

    messages: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class CourierCounters:
    """Counts since the start of the process. Written by `Courier`, read by telemetry."""

    sent: int = 0  # handed to ZMQ
    delayed: int = 0  # went through an outbox
    unknown_peer: int = 0  # dropped: no such peer
    peer_down: int = 0  # dropped from an outbox at the death of its peer
    stalled: int = 0  # refused: the outbox was full


@dataclass(slots=True)
class _Peer:
    """A connection. Invariant: while the outbox has messages, ZMQ was last seen without POLLOUT."""

    name: str
    incarnation: int
    socket: zmq.Socket[bytes]
    outbox: deque[bytes] = field(default_factory=deque)
    outbox_bytes: int = 0
    watched: bool = False

    @property
    def fd(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))


class Courier(Closing, Generic[M]):
    """Sends messages to peers by name, in order per peer, each once."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], codec: Encodes[M], limits: OutboxLimits | None = None
    ) -> None:
        self.limits = limits or OutboxLimits()
        self.counters = CourierCounters()
        self._context = context
        self._encode = codec.encode
        self._peers: dict[str, _Peer] = {}
        self._ended: dict[str, int] = {}  # highest ended incarnation of each name
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def peers(self) -> dict[str, int]:
        """Names and incarnations of the connected peers."""
        return {name: peer.incarnation for name, peer in self._peers.items()}

    def connect(self, name: str, endpoint: str, incarnation: int) -> bool:
        """Connect to a peer. A higher incarnation replaces a lower one; late announcements are ignored.

        Returns whether there is a new connection. Raises TransportError for an endpoint that ZMQ rejects.
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
        """Drop a connection and its outbox. Returns the number of lost messages.

        incarnation: the one that ended; a newer one stays connected.
        """
        peer = self._peers.get(name)
        ended = incarnation if incarnation is not None else (peer.incarnation if peer else -1)
        self._ended[name] = max(ended, self._ended.get(name, -1))
        if peer is None or peer.incarnation > ended:
            return 0
        del self._peers[name]
        return self._drop(peer)

    def send(self, name: str, message: M) -> bool:
        """Send now, or append to the outbox. Returns False for an unknown peer, and counts the message.

        Raises PeerStalled when the outbox is full and TransportError when the message is too large. Neither affects
        other messages.
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
        """Retry the outboxes. Returns the number of messages that still wait. Cheap when all are empty."""
        return sum(self._flush(peer) for peer in self._peers.values() if peer.outbox)

    def pending(self, name: str) -> Backlog:
        """Return the backlog of a peer; zeros for an unknown one."""
        peer = self._peers.get(name)
        return Backlog(messages=len(peer.outbox), size_bytes=peer.outbox_bytes) if peer else Backlog()

    def blocked(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets of peers with a backlog, for `Mailbox.wait`."""
        return [peer.socket for peer in self._peers.values() if peer.outbox]

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Flush each outbox on `loop` as soon as its peer reads again, until `detach`."""
        self._loop = loop
        for peer in self._peers.values():
            if peer.outbox:
                self._watch(peer)

    def detach(self) -> None:
        """Detach from the loop. Outboxes keep their messages. Safe to call twice."""
        for peer in self._peers.values():
            self._unwatch(peer)
        self._loop = None

    def close(self, linger_s: float = 0.0) -> None:
        """Close all connections. linger_s: time for `Context.term` to deliver queued messages."""
        for peer in self._peers.values():
            self._flush(peer)
            self._drop(peer, linger_ms=round(linger_s * 1000))
        self._peers.clear()
        self._loop = None

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
        self._flush(peer)  # there may be room again: restores the invariant

    def _flush(self, peer: _Peer) -> int:
        # A non-blocking send may raise Again because of a stale view of the queue, which ZMQ updates now and then.
        # Reading EVENTS always updates it, so EVENTS decides when to wait for the descriptor.
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
