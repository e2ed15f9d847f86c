"""What the supervisor sends: introductions, partings, words to one child or to all. Owned by the supervisor."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mstar_core.errors import MstarError
from mstar_core.messages.life import Hello, PeerDown, PeerReady, PeerUp
from mstar_core.messages.wire import Message
from mstar_core.supervisor.child import Child
from mstar_core.transport import Courier

log = logging.getLogger(__name__)

SPEAKS = ("known", "ready")
"""States of a child that can be spoken to."""


class Outbound:
    """Speaks to children by name. A child that does not read is logged; its watchdog decides about it."""

    def __init__(self, courier: Courier[Message], children: Mapping[str, Child]) -> None:
        self._courier = courier
        self._children = children

    def send(self, name: str, message: Message) -> None:
        """Tell one child."""
        try:
            self._courier.send(name, message)
        except MstarError as error:
            log.warning("%s was not told: %s", name, error)

    def broadcast(self, message: Message, but: str = "") -> None:
        """Tell every child that can be spoken to."""
        for child in self._children.values():
            if child.state in SPEAKS and child.name != but:
                self.send(child.name, message)

    def flush(self) -> None:
        """Try again what children did not take yet."""
        self._courier.flush()

    def introduce(self, child: Child, hello: Hello) -> bool:
        """Answer a hello: tell the child of all others, and them of it. True the first time in its life."""
        first = not child.endpoint
        self._courier.connect(child.name, hello.endpoint, hello.incarnation)
        child.endpoint, child.fd_endpoint = hello.endpoint, hello.fd_endpoint
        if child.state == "spawned":
            child.state = "known"
        up = _peer_up(child)
        self.send(child.name, up)
        for other in self._children.values():
            if other is child or other.state not in SPEAKS:
                continue
            self.send(child.name, _peer_up(other))
            if first:
                self.send(other.name, up)
            if other.state == "ready":
                self.send(child.name, _peer_ready(other))
        return first

    def announce_ready(self, child: Child) -> None:
        """Tell the others that a child may be given work."""
        self.broadcast(_peer_ready(child), child.name)

    def part(self, child: Child, cause: str) -> None:
        """Tell the others that a child is gone, and drop what waits for it."""
        self.broadcast(PeerDown(name=child.name, incarnation=child.incarnation, cause=cause), child.name)
        self._courier.disconnect(child.name, child.incarnation)


def _peer_up(child: Child) -> PeerUp:
    return PeerUp(
        name=child.name, incarnation=child.incarnation, endpoint=child.endpoint, fd_endpoint=child.fd_endpoint
    )


def _peer_ready(child: Child) -> PeerReady:
    return PeerReady(name=child.name, incarnation=child.incarnation, facts=child.facts)
