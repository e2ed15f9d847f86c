"""Listening end of a tensor-parallel group: the leader waits for the connections of its followers.

On one host it is a Unix socket. Over TCP, a connection counts only after a mutual proof of the key of the group.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Final

from mstar_core.closing import Closing
from mstar_core.engine.group.connection import BUFFER_BYTES, PROOF_S, set_options
from mstar_core.engine.group.proof import ANSWER_BYTES, Proof, nonce
from mstar_core.errors import StartError
from mstar_core.parallel.groups import GroupPlace
from mstar_core.parallel.meeting import Meeting, listen

log = logging.getLogger(__name__)

MOST_STRANGERS: Final = 64
"""Connections without proof at once. The oldest is closed for another one: idle ones cannot keep members out."""


class LocalListener(Closing):
    """The leader's Unix socket."""

    def __init__(self, place: GroupPlace) -> None:
        self._place = place
        place.socket.unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._server.bind(str(place.socket))
        place.socket.chmod(0o600)
        self._server.listen(place.size)

    def gather(self) -> list[socket.socket]:
        """Wait for all followers and return their connections. Raises StartError after a time limit."""
        self._server.settimeout(self._place.join_s)
        followers: list[socket.socket] = []
        try:
            while len(followers) < self._place.size - 1:
                follower, _ = self._server.accept()
                follower.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                followers.append(follower)
        except TimeoutError as error:
            raise StartError(
                "a follower did not join the tensor-parallel group", f"within {self._place.join_s:g} s", phase="group"
            ) from error
        return followers

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        self._server.close()
        self._place.socket.unlink(missing_ok=True)


@dataclass(slots=True, eq=False)
class _Stranger:
    """A connection that has not proved the key yet. until: of its time."""

    connection: socket.socket
    source: str
    proof: Proof
    until: float
    received: bytearray = field(default_factory=bytearray)


class RemoteListener(Closing):
    """The leader's TCP port. It accepts connections until all followers have joined, and is closed then."""

    def __init__(self, place: GroupPlace, meeting: Meeting) -> None:
        self._place = place
        self._meeting = meeting
        self._selector = selectors.DefaultSelector()
        self._strangers: list[_Stranger] = []
        self._followers: dict[int, socket.socket] = {}
        self._refused = 0
        self._server = listen(meeting.host, meeting.plan_port, "its plans")
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)

    def gather(self) -> list[socket.socket]:
        """Wait for all followers and return their connections in the order of ranks. Raises StartError."""
        end = time.monotonic() + self._place.join_s
        while len(self._followers) < self._place.size - 1:
            now = time.monotonic()
            if now > end:
                raise self._missing()
            for stranger in [each for each in self._strangers if each.until < now]:
                self._refuse(stranger, f"no proof within {PROOF_S:g} s")
            for key, _ in self._selector.select(0.1):
                if key.data is None:
                    self._admit()
                elif key.data in self._strangers:  # not closed for another one a moment ago
                    self._hear(key.data)
        followers = [self._followers.pop(index) for index in sorted(self._followers)]
        self.close()
        return followers

    def close(self) -> None:
        """Close the port and all connections without proof. Safe to call twice."""
        for stranger in self._strangers:
            stranger.connection.close()
        self._strangers.clear()
        for follower in self._followers.values():
            follower.close()
        self._followers.clear()
        self._selector.close()
        self._server.close()

    def _admit(self) -> None:
        try:
            connection, (source, port, *_) = self._server.accept()
        except OSError:  # it ended before it was accepted
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._refuse(self._strangers[0], "others wait")
        challenge = nonce()
        connection.setblocking(False)
        proof = Proof(self._place, challenge)
        stranger = _Stranger(connection, f"{source}:{port}", proof, time.monotonic() + PROOF_S)
        self._strangers.append(stranger)
        self._selector.register(connection, selectors.EVENT_READ, stranger)
        try:
            connection.send(challenge)  # an empty buffer has room for it
        except OSError as error:
            self._refuse(stranger, str(error))

    def _hear(self, stranger: _Stranger) -> None:
        try:
            data = stranger.connection.recv(ANSWER_BYTES - len(stranger.received))
        except BlockingIOError:
            return
        except OSError as error:
            return self._refuse(stranger, str(error))
        if not data:
            return self._refuse(stranger, "it closed the connection")
        stranger.received += data
        if len(stranger.received) == ANSWER_BYTES:
            self._judge(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        verified = stranger.proof.verified(bytes(stranger.received))
        if verified is None:
            return self._refuse(stranger, "it does not have the key of the group")
        index, follower_nonce = verified
        try:
            stranger.connection.send(stranger.proof.leader(index, follower_nonce))
        except OSError as error:
            return self._refuse(stranger, str(error))
        self._selector.unregister(stranger.connection)
        self._strangers.remove(stranger)
        if index in self._followers:  # it connects again because its last connection was lost
            self._followers.pop(index).close()
        stranger.connection.setblocking(True)
        set_options(stranger.connection)
        self._followers[index] = stranger.connection

    def _refuse(self, stranger: _Stranger, why: str) -> None:
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:  # a port scan must not fill the log
            log.warning(
                "refused connection %d to the plans of group %s, from %s: %s",
                self._refused,
                self._place.name,
                stranger.source,
                why,
            )
        self._selector.unregister(stranger.connection)
        self._strangers.remove(stranger)
        stranger.connection.close()

    def _missing(self) -> StartError:
        missing = [self._place.member(i) for i in range(1, self._place.size) if i not in self._followers]
        count = "1 connection was" if self._refused == 1 else f"{self._refused} connections were"
        refused = f"; {count} refused" if self._refused else ""
        return StartError(
            f"{' and '.join(missing)} did not join the tensor-parallel group",
            f"no connection to {self._meeting.plans} within {self._place.join_s:g} s{refused}",
            f"see the log of each; port {self._meeting.plan_port} must be open to its host",
            phase="group",
        )


def open_listener(place: GroupPlace) -> LocalListener | RemoteListener:
    """Open the leader's end. Raises StartError if its port is in use."""
    return LocalListener(place) if place.meeting is None else RemoteListener(place, place.meeting)
