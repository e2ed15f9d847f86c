"""Whether the api's port can be taken. Asked by `up` before it starts anything and again by the supervisor."""

from __future__ import annotations

import errno
import socket
from typing import Final

from mstar_core.errors import StartError

SEARCHED: Final = 64
"""How many ports above a taken one are looked at for a free one to name."""


def check_port(host: str, port: int, holder: str = "") -> None:
    """Raises StartError when nothing can listen there. holder: who is known to have the port, for the error."""
    error = bind_error(host, port)
    if error is None:
        return
    if error.errno != errno.EADDRINUSE:
        raise StartError(
            f"{host}:{port} cannot be listened on",
            error.strerror or str(error),
            "choose another with --host or --port",
            phase="plan",
            code="address_unusable",
        ) from error
    free = next((p for p in range(port + 1, min(port + SEARCHED, 65536)) if bind_error(host, p) is None), None)
    hint = f"choose another: --port {free}" if free is not None else "choose another with --port"
    detail = f"{holder} listens there" if holder else "another process listens there"
    raise StartError(f"port {port} on {host} is taken", detail, hint, phase="plan", code="port_in_use") from error


def bind_error(host: str, port: int) -> OSError | None:
    """What binding gives just now; None when it works."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None
