"""Port of the api: availability, checked by `up` before it starts any process, and the socket of the supervisor."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.config.resolved import EVERYWHERE
from mstar_core.errors import StartError
from mstar_core.host.run_dir import RunDirectory, deployments

SEARCHED: Final = 64
"""Ports above the one in use among which the hint looks for a free one."""


def check_port(host: str, port: int, holder: str = "") -> None:
    """Raise StartError if the api cannot listen there. holder: the known owner of the port, for the error."""
    error = bind_error(host, port)
    if error is None:
        if holder:
            raise _taken(host, port, f"{holder} has it")
        return
    raise _unusable(host, port, error, holder) from error


def bind_port(host: str, port: int) -> socket.socket:
    """Bind the port without listening. Raises StartError if it is in use or the host is not local."""
    try:
        return _bound(host, port)
    except OSError as error:
        raise _unusable(host, port, error) from error


def _unusable(host: str, port: int, error: OSError, holder: str = "") -> StartError:
    if error.errno == errno.EADDRINUSE:
        return _taken(host, port, f"{holder or 'another process'} listens there")
    return StartError(
        f"cannot listen on {host}:{port}",
        error.strerror or str(error),
        "choose another with --host or --port",
        phase="plan",
        code="address_unusable",
    )


def _taken(host: str, port: int, detail: str) -> StartError:
    free = next((p for p in range(port + 1, min(port + SEARCHED, 65536)) if bind_error(host, p) is None), None)
    hint = f"choose another: --port {free}" if free is not None else "choose another with --port"
    return StartError(f"port {port} on {host} is taken", detail, hint, phase="plan", code="port_in_use")


def port_claimant(host: str, port: int, run: RunDirectory) -> str:
    """Return the other deployment that is configured to listen there, "" if none.

    A deployment that is starting has claimed its port before it binds it.
    """
    for other in deployments(run.path.parent):
        if other.name == run.name:
            continue
        try:
            api = DeploymentSpec.load(other.spec).api
        except (OSError, ValueError):  # it has ended meanwhile, or is of another version
            continue
        overlaps = api.host == host or host in EVERYWHERE or api.host in EVERYWHERE
        if api.port == port and overlaps and other.holder() is not None:
            return f"deployment {other.name!r}"
    return ""


@contextmanager
def one_start(run: RunDirectory) -> Iterator[None]:
    """Hold the lock under which a start compares its port with other deployments' and writes its own spec."""
    fd = os.open(run.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def bind_error(host: str, port: int) -> OSError | None:
    """Return the error of binding the port, None if it succeeds."""
    try:
        _bound(host, port).close()
    except OSError as error:
        return error
    return None


def _bound(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that is bound to the port. Raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
