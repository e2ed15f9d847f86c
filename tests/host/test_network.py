"""Ports that a process chooses for itself."""

from __future__ import annotations

import socket
from pathlib import Path

from mstar_core.host.network import LOOPBACK, free_ports

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_free_ports_differ_and_no_outgoing_connection_gets_one() -> None:
    first, last = map(int, OUTGOING.read_text(encoding="ascii").split())
    found = free_ports(LOOPBACK, 20)
    assert len(set(found)) == 20 and not any(first <= port <= last for port in found)
    for port in found:
        with socket.create_server((LOOPBACK, port)):
            pass
