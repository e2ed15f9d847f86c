"""Outbound messages of the supervisor: introductions, farewells, messages to one child or all."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mstar_core.errors import MstarError
from mstar_core.messages.life import Hello, PeerDown, PeerReady, PeerUp
from mstar_core.messages.wire import Message
from mstar_core.supervisor.child import Child
from mstar_core.transport import Courier

log = logging.getLogger(__name__)

REACHABLE = ("known", "ready")
"""States of a child that can receive messages."""


class Outbound:
    """Sends messages to children by name. Owned by the supervisor.

    A failed send is logged; the watchdog deals with a child that does not read.
    """

    def __init__(self, courier: Courier, children: Mapping[str, Child]) -> None:
        self._courier = courier
        self._children = children

    def send(self, name: str, message: Message) -> None:
        """Send to one child."""
        try:
            self._courier.send(name, message)
        except MstarError as error:
            log.warning("a message to %s was not sent: %s", name, error)

    def broadcast(self, message: Message, except_for: str = "") -> None:
        """Send to every reachable child."""
        for child in self._children.values():
            if child.state in REACHABLE and child.name != except_for:
                self.send(child.name, message)

    def introduce(self, child: Child, hello: Hello) -> bool:
        """Answer a hello: introduce the child to all others, and all others to the child.

        Returns True for the first hello of an incarnation.
        """
        first = not child.endpoint
        self._courier.connect(child.name, hello.remote_endpoint if child.host else hello.endpoint, hello.incarnation)
        child.endpoint, child.fd_endpoint = hello.endpoint, hello.fd_endpoint
        child.remote_endpoint, child.blob_endpoint = hello.remote_endpoint, hello.blob_endpoint
        if child.state == "spawned":
            child.state = "known"
        up = _peer_up(child)
        for other in self._children.values():
            if other is child or other.state not in REACHABLE:
                continue
            self.send(child.name, _peer_up(other))
            if first:
                self.send(other.name, up)
            if other.state == "ready":
                self.send(child.name, _peer_ready(other))
        self.send(child.name, up)  # last: from then on the child knows all its peers
        return first

    def announce_ready(self, child: Child) -> None:
        """Tell the others that a child accepts work."""
        self.broadcast(_peer_ready(child), child.name)

    def part(self, child: Child, cause: str, public: str, *, is_excused: bool = False) -> None:
        """Tell the others that a child is gone, and drop its pending messages. public: the cause for clients."""
        down = PeerDown(
            name=child.name, incarnation=child.incarnation, cause=cause, public=public, is_excused=is_excused
        )
        self.broadcast(down, child.name)
        self._courier.disconnect(child.name, child.incarnation)


def _peer_up(child: Child) -> PeerUp:
    return PeerUp(
        name=child.name,
        incarnation=child.incarnation,
        endpoint=child.endpoint,
        fd_endpoint=child.fd_endpoint,
        host=child.host,
        remote_endpoint=child.remote_endpoint,
        blob_endpoint=child.blob_endpoint,
    )


def _peer_ready(child: Child) -> PeerReady:
    return PeerReady(name=child.name, incarnation=child.incarnation, facts=child.facts)
