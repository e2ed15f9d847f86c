"""Names of deployments and devices of several hosts: as they are on this host, `HOST/NAME` on another one."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

from mstar_core.host.other_hosts.contexts import LOCAL
from mstar_core.host.run_dir import RunDirectory, runtime_root

FORWARDS: Final = ".forwards"
"""Folder of the ends of connections to deployments of other hosts, beside the run directories."""


def qualified(host: str, name: str) -> str:
    """Return the name of a deployment or device of a host."""
    return name if host == LOCAL else f"{host}/{name}"


def host_of(name: str) -> str:
    """Return the host of a deployment or device."""
    host, slash, _ = name.partition("/")
    return host if slash else LOCAL


def name_there(name: str) -> str:
    """Return the name that a deployment or device has on its host."""
    return name.rpartition("/")[2]


def forwards_folder() -> Path:
    """Return the folder of this process for sockets that lead to other hosts."""
    return runtime_root() / FORWARDS / str(os.getpid())


def make_forwards_folder() -> None:
    """Make the folder of this process, and remove those of gateways that were killed."""
    mine = forwards_folder()
    mine.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in mine.parent.iterdir():
        if folder.name.isdecimal() and not Path("/proc", folder.name).exists():
            shutil.rmtree(folder, ignore_errors=True)


def admin_socket_of(deployment: str) -> Path:
    """Return the admin socket of a deployment: in its run directory, or the end of its connection on this host.

    That of another host has a short name, because the path of a socket is limited.
    """
    if host_of(deployment) == LOCAL:
        return RunDirectory.of(deployment).admin_socket
    return forwards_folder() / hashlib.sha256(deployment.encode()).hexdigest()[:12]
