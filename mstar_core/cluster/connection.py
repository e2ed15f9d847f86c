"""Checks before a connection to Ray: Ray itself waits 80 seconds for a wrong address and does not say what is there."""

from __future__ import annotations

import os
import socket
from typing import Final

from mstar_core.errors import ConfigError, Unreachable

AUTO: Final = "auto"
RAY_PORT: Final = 6379
ANSWER_S: Final = 3.0

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""First bytes of an HTTP/2 client, with empty SETTINGS (RFC 9113, 3.4). Ray's head is a gRPC server."""

_SETTINGS: Final = 4


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of Ray's head. Raises ConfigError."""
    if "://" in address:
        raise ConfigError(
            f"{address!r} is not the address of a Ray head",
            "clients of Ray (ray://) cannot reserve hosts for others",
            f"give HOST:{RAY_PORT}, and run ray start --address=HOST:{RAY_PORT} on this host",
            key="ray.address",
        )
    host, colon, port = address.strip().rpartition(":")
    if not colon:
        return address.strip(), RAY_PORT
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is not HOST:PORT", hint=f"such as 10.0.0.1:{RAY_PORT}", key="ray.address")
    return host, int(port)


def check_listener(host: str, port: int, timeout_s: float = ANSWER_S) -> None:
    """Raise Unreachable unless a gRPC server listens at an address. With RAY_USE_TLS, only that something listens."""
    place = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as sock:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return
            sock.sendall(_PREFACE)
            head = _first_bytes(sock)
    except TimeoutError:
        raise Unreachable(
            f"no host answers at {place}",
            f"{timeout_s:.0f} s have passed",
            f"check the address, and that firewalls let port {port} through",
        ) from None
    except OSError as error:
        hint = f"start a head there: ray start --head --port={port}"
        if isinstance(error, socket.gaierror):
            hint = "check the name, or give an address"
        raise Unreachable(f"no Ray cluster at {place}", error.strerror or str(error), hint) from None
    if not _is_settings(head):
        raise Unreachable(
            f"another program than Ray listens at {place}",
            f"it answered {head[:40]!r}" if head else "it did not answer like Ray's head",
            "give the address that `ray start --head` printed; 8265 is the dashboard and 10001 is for clients",
        )


def is_own(address: str) -> bool:
    """Return whether an IP address is one of this host, on any interface."""
    try:
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
            return True
    except OSError:
        return False


def _first_bytes(sock: socket.socket) -> bytes:
    """Return the first 9 bytes or more that a server sends, fewer if it does not."""
    head = b""
    try:
        while len(head) < 9:
            part = sock.recv(256)
            if not part:
                break
            head += part
    except OSError:
        pass
    return head


def _is_settings(head: bytes) -> bool:
    """Return whether bytes begin with a SETTINGS frame of connection 0 (RFC 9113, 4.1 and 6.5)."""
    if len(head) < 9:
        return False
    return head[3] == _SETTINGS and head[5:9] == bytes(4)
