"""CURVE key pairs: creation, the private file in a run directory, and the options of sockets that use them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

import msgspec
import zmq

from mstar_core.errors import TransportError
from mstar_core.host.private_files import write_private
from mstar_core.transport.remote import CurveKeys

KEYS_FILE: Final = "curve.json"
"""Name of the key file in a run directory."""

ZAP_DOMAIN: Final = b"mstar"
HANDSHAKE_MS: Final = 5000
"""Time after which a connection without a complete handshake is closed."""

MOST_BYTES: Final = 80 << 20
"""Largest frame that a socket accepts: the largest message of the api and its envelope. Also limits what a client
without a key can make this process hold."""


def make_keys() -> CurveKeys:
    """Return a new key pair."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode())


def write_keys(path: Path, keys: CurveKeys) -> None:
    """Write a key pair to a file of mode 0600, whole or not at all."""
    write_private(path, msgspec.json.encode({"public": keys.public, "secret": keys.secret}))


def read_keys(path: Path) -> CurveKeys:
    """Read a key pair. Raises TransportError when the file is missing, open to others, or holds no pair."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read()
    except OSError as error:
        raise TransportError("the keys of the deployment cannot be read", f"{path}: {error.strerror}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise TransportError(
            "the keys of the deployment are open to others",
            f"{path} has owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}",
            "it must belong to the user that runs the deployment, with mode 0600; start the deployment anew",
        )
    try:
        pair = msgspec.json.decode(data, type=dict[str, str])
        keys = CurveKeys(pair["public"], pair["secret"])
        is_pair = zmq.curve_public(keys.secret.encode()).decode() == keys.public
    except (msgspec.DecodeError, KeyError, ValueError, zmq.ZMQError):
        is_pair = False
    if not is_pair:
        raise TransportError("the keys of the deployment cannot be read", f"{path} holds no CURVE key pair")
    return keys


def serve_curve(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Make a socket accept CURVE clients only. Without an `Authenticator` in its context it accepts none."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    _keep_alive(socket)


HEARTBEAT_MS: Final = 3000
SILENCE_MS: Final = 10_000
"""Silence after a heartbeat after which a connection is made again: the limit of the supervisor for its heartbeats."""

RECONNECT_MS: Final = 100
RECONNECT_MOST_MS: Final = 2000
CONNECT_MS: Final = 5000


def connect_curve(socket: zmq.Socket[bytes], endpoint: str, keys: CurveKeys, server_key: str) -> None:
    """Connect a socket to a CURVE server of another host: with heartbeats, and again after each loss. Never waits.

    Raises zmq.ZMQError for an endpoint or a key that ZMQ rejects.
    """
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_key)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    _keep_alive(socket)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(endpoint)


def _keep_alive(socket: zmq.Socket[bytes]) -> None:
    """Let the kernel find dead connections too, at a side that sends nothing."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 4)
