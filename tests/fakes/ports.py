"""Ports for test servers that no other test process or outgoing connection can take."""

from __future__ import annotations

import random
import socket
from typing import Final

RANGE: Final = range(20_000, 26_000)
"""Below the ports that Linux assigns to outgoing connections (32768 to 60999 by default), and those that gateways and
hosts choose for themselves.
"""

TRIES: Final = 1000


def free_port() -> int:
    """Return a free port that no other test process on this machine gets while this one runs."""
    for port in random.SystemRandom().choices(RANGE, k=TRIES):
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0mstar-test-port-{port}")  # an abstract name: no file, and only one holder
            with socket.socket() as probe:
                probe.setsockopt(
                    socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
                )  # as servers do, so that old connections do not block the port
                probe.bind(("127.0.0.1", port))
        except OSError:
            mark.close()
            continue
        mark.detach()  # stays open until this process ends, which reserves the port
        return port
    raise AssertionError(f"{TRIES} ports between {RANGE.start} and {RANGE.stop} are taken")
