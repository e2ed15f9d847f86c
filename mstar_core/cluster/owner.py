"""Owners of reserved room, and the names of reservations, which tell whose they are."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

PREFIX: Final = "mstar"
_BEGUN_FIELD: Final = 19
"""Place of `starttime` behind the command in /proc/PID/stat (proc(5))."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A supervisor that reserves room. begun: its start, in clock ticks since the boot of its host."""

    host: str
    pid: int
    begun: int

    def has_ended(self) -> bool:
        """Return whether it is a process of this host that has ended; false for processes of other hosts."""
        return self.host == socket.gethostname() and begun(self.pid) != self.begun


class Reservation(NamedTuple):
    """The name of a placement group: room of a deployment on a host, whose name is empty for the owner's."""

    deployment: str
    owner: Owner
    host: str

    def __str__(self) -> str:
        owner = self.owner
        return "/".join((PREFIX, self.deployment, owner.host, str(owner.pid), str(owner.begun), self.host))


def reservation(name: str) -> Reservation | None:
    """Read the name of a placement group; None if it is not one of ours."""
    parts = name.split("/")
    if len(parts) != 6 or parts[0] != PREFIX or not (parts[3].isdigit() and parts[4].isdigit()):
        return None
    _, deployment, host, pid, start, name = parts
    return Reservation(deployment, Owner(host=host, pid=int(pid), begun=int(start)), name)


def this_process() -> Owner:
    """Return this process as an owner."""
    return Owner(host=socket.gethostname(), pid=os.getpid(), begun=begun(os.getpid()) or 0)


def begun(pid: int) -> int | None:
    """Return when a process of this host began, in clock ticks since its boot; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[_BEGUN_FIELD])
    except (OSError, IndexError, ValueError):
        return None
