"""Connection of a follower to the leader of its tensor-parallel group: a stream socket that reports a peer's end.

On one host it is a Unix socket. Over TCP, both ends prove the key of the group first.
"""

from __future__ import annotations

import hmac
import socket
import time
from contextlib import suppress
from functools import partial
from typing import Final

from mstar_core.engine.group.proof import NONCE_BYTES, PROOF_BYTES, Proof, nonce
from mstar_core.errors import StartError
from mstar_core.parallel.groups import GroupPlace
from mstar_core.parallel.meeting import Meeting

LOCAL_NAP_S: Final = 0.02
REMOTE_NAP_S: Final = 0.2
"""Waits between two attempts to connect."""

BUFFER_BYTES: Final = 4 << 20
"""Buffer of a socket within one host: plans that the leader may be ahead of a follower. TCP sizes its own."""

PROOF_S: Final = 5.0
"""Time limit of a proof, and of one attempt to connect."""

LOST_MS: Final = 15_000
"""Time after which unacknowledged data ends a TCP connection."""

ALIVE_S: Final = 5
"""Idle time after which the kernel probes whether the peer's host still answers."""


def connect(place: GroupPlace) -> socket.socket:
    """Connect a follower to its leader. Raises StartError after a time limit."""
    meeting = place.meeting
    if meeting is None:
        attempt, at, nap_s, hint = partial(_local, place), str(place.socket), LOCAL_NAP_S, ""
    else:
        attempt, at, nap_s = partial(_remote, place, meeting), meeting.plans, REMOTE_NAP_S
        hint = f"; {place.member(place.index)} must be able to reach {at}"
    end = time.monotonic() + place.join_s
    while True:
        try:
            return attempt()
        except OSError as error:
            if time.monotonic() > end:
                raise StartError(
                    f"the leader of the tensor-parallel group, {place.member(0)}, does not answer",
                    f"{at}: {error}",
                    f"see the leader's log{hint}",
                    phase="group",
                ) from error
            time.sleep(nap_s)


def _local(place: GroupPlace) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        connection.connect(str(place.socket))
    except BaseException:
        connection.close()
        raise
    return connection


def _remote(place: GroupPlace, meeting: Meeting) -> socket.socket:
    """Connect once, with mutual proof. Raises OSError."""
    connection = socket.create_connection((meeting.host, meeting.plan_port), PROOF_S)
    try:
        if connection.getsockname() == connection.getpeername():  # possible on one host while no process listens
            raise ConnectionRefusedError("no process listens there")
        proof, mine = Proof(place, _exactly(connection, NONCE_BYTES)), nonce()
        connection.sendall(proof.answer(place.index, mine))
        if not hmac.compare_digest(_exactly(connection, PROOF_BYTES), proof.leader(place.index, mine)):
            raise ConnectionRefusedError("the process that listens there does not have the key of the group")
        connection.settimeout(None)
        set_options(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        data = connection.recv(count - len(received))
        if not data:
            raise ConnectionResetError("the process that listens there closed the connection")
        received += data
    return bytes(received)


def set_options(connection: socket.socket) -> None:
    """Send plans at once, and end the connection if the peer's host is lost."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ALIVE_S)
    with suppress(OSError):  # some container runtimes lack it; keepalive and the supervisor's limits remain
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)
