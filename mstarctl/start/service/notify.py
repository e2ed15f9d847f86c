"""Notifications to systemd about the state of an attached `up` (sd_notify(3)). Without systemd nothing is sent."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Final

SOCKET: Final = "NOTIFY_SOCKET"
READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"


def notify(state: str, status: str = "") -> bool:
    """Send a state and a status line to the service manager that started this process. Returns whether one was named.

    state: `READY=1`, `STOPPING=1`, or empty for a status line alone. An unreachable socket is ignored, because the
    deployment runs without it as well.
    """
    path = os.environ.get(SOCKET, "")
    if not path.startswith(("/", "@")):
        return False
    lines = [line for line in (state, f"STATUS={status}" if status else "") if line]
    address = "\0" + path[1:] if path.startswith("@") else path  # "@" names an abstract socket
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.sendto("\n".join(lines).encode(), address)
    return True
