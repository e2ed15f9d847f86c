"""Socket paths of processes inside the run directory, and their access checks."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mstar_core.errors import TransportError

PATH_LIMIT_BYTES = 107  # sun_path holds 108 bytes on Linux, the last one is NUL
IPC = "ipc://"


def mailbox_endpoint(directory: Path, name: str, incarnation: int) -> str:
    """Return the endpoint of the mailbox of `name`. The incarnation makes it unique across restarts."""
    return f"{IPC}{directory / f'{name}.{incarnation}'}"


def arena_path(directory: Path, name: str, incarnation: int) -> Path:
    """Return the path of the socket that hands out the shared memory of `name`."""
    return directory / f"{name}.{incarnation}.fd"


def socket_file(endpoint: str) -> Path | None:
    """Return the socket file of an endpoint, or None if it has none (tcp, inproc)."""
    return Path(endpoint.removeprefix(IPC)) if endpoint.startswith(IPC) else None


def check_path(path: Path) -> None:
    """Raise TransportError when `path` cannot hold a socket: too long, taken, or in a directory open to others."""
    length = len(os.fsencode(path))
    if length > PATH_LIMIT_BYTES:
        raise TransportError(
            "the path of a socket is too long",
            f"{path} has {length} bytes, the system allows {PATH_LIMIT_BYTES}",
            "set MSTAR_RUNTIME_DIR to a shorter directory",
        )
    _check_private(path.parent)
    if path.exists():
        raise TransportError(
            "a socket of this name exists already",
            f"{path} was not made by this process",
            "another deployment runs in this directory, or it was not swept after a crash",
        )


def _check_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise TransportError(
            "the socket directory is open to others",
            f"{directory} has owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}",
            "it must belong to the user that runs the deployment, with mode 0700",
        )
