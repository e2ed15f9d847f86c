"""Values of the `ray:` section: devices on hosts, addresses, networks, ranges of ports. Read by checks and planners."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

CPU: Final = "cpu"
LAST_PORT: Final = 65535
LONGEST_INTERFACE: Final = 15
"""Most characters of the name of a network interface (IFNAMSIZ without its end)."""

_HOST: Final = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevice:
    """A device on a host: a GPU by its index, the CPU, or with neither any GPU of the host."""

    host: str
    index: int | None = None
    is_cpu: bool = False


def host_device(text: str) -> HostDevice | None:
    """Read `HOST:INDEX`, `HOST:cpu` or `HOST`; None for other text."""
    host, colon, device = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, colon, device = text, "", ""
    if _HOST.fullmatch(host) is None or not (device in ("", CPU) or device.isdecimal()) or (colon and not device):
        return None
    name = host.strip("[]")
    return HostDevice(host=name, index=int(device) if device.isdecimal() else None, is_cpu=device == CPU)


def is_ray_address(text: str) -> bool:
    """Return whether a text is `auto` or `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    is_port = port.isdecimal() and 1 <= int(port) <= LAST_PORT
    return text == "auto" or is_port and _HOST.fullmatch(host) is not None


def is_network(text: str) -> bool:
    """Return whether a text is the name of an interface, or a network such as `10.0.0.0/24`."""
    if "/" not in text:
        return len(text) <= LONGEST_INTERFACE and not re.search(r"\s", text)
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def port_range(text: str) -> tuple[int, int] | None:
    """Read `FIRST-LAST`, ports of 1 to 65535; None for other text."""
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal()):
        return None
    ports = int(first), int(last)
    return ports if 1 <= ports[0] <= ports[1] <= LAST_PORT else None
