"""Ports for the servers of tests: none that another test process or an outgoing connection could take first."""

from __future__ import annotations

import random
import socket
from typing import Final

RANGE: Final = range(20_000, 32_000)
"""Below the ports that Linux gives to outgoing connections (32768 to 60999 unless set otherwise)."""

TRIES: Final = 1000


def free_port() -> int:
    """A port that nobody has, and that no other test process on this machine is given while this one runs."""
    for port in random.SystemRandom().choices(RANGE, k=TRIES):
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0mstar-test-port-{port}")  # an abstract name: no file, and one holder at a time
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: an old connection is fine
                probe.bind(("127.0.0.1", port))
        except OSError:
            mark.close()
            continue
        mark.detach()  # it stays open, and the port ours, until this process ends
        return port
    raise AssertionError(f"{TRIES} ports between {RANGE.start} and {RANGE.stop} are taken")
