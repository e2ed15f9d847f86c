"""Network of this host: addresses of its interfaces, RDMA adapters, and whether Mooncake's transfer engine loads.

Used by the planner, `doctor` and the workers.
"""

from __future__ import annotations

import array
import fcntl
import importlib
import random
import socket
import struct
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Final

from mstar_core.errors import TransportError, did_you_mean

LOOPBACK: Final = "127.0.0.1"
ADAPTERS: Final = Path("/sys/class/infiniband")
SYSTEM_LIBRARIES: Final = "libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1"
_SIOCGIFADDR: Final = 0x8915
"""ioctl for an interface's IPv4 address (netdevice(7))."""

_SIOCGIFCONF: Final = 0x8912
"""ioctl for the IPv4 addresses of all interfaces (netdevice(7))."""

_IFREQ_BYTES: Final = 40
_MOST_ADDRESSES: Final = 1024

_OUTGOING: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that the kernel gives to outgoing connections, such as 32768 and 60999."""

_PRIVILEGED: Final = 1024
_TRIED: Final = 6000
"""Ports below those of outgoing connections that are tried."""

WINDOW_PORTS: Final = 4
"""Ports that an incarnation of a rank chooses its two from: the handshake's and the data's."""

WINDOWS: Final = 4
"""Windows of a rank. Successive incarnations use different ones: peers remember the data's port by that of the
handshake, and a port that was closed cannot be opened for a minute."""


def window(first: int, rank: int, incarnation: int = 0) -> range:
    """Return the ports of an incarnation of a rank. first: of the deployment."""
    start = first + (rank * WINDOWS + incarnation % WINDOWS) * WINDOW_PORTS
    return range(start, start + WINDOW_PORTS)


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface, "" for one without."""
    return {name: _address(name) for _, name in socket.if_nameindex()}


def _address(interface: str) -> str:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def interface_of(host: str) -> str:
    """Return the network interface that has an address of this host, given as IPv4 address or host name.

    Raises TransportError if there is none.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise TransportError(f"the host name {host!r} has no IPv4 address", str(error)) from error
    known = _interfaces_by_address()
    if address.startswith("127."):  # the loopback interface has this whole network
        address = LOOPBACK
    if address not in known:
        names = ", ".join(f"{name} {each}" for each, name in known.items())
        raise TransportError(f"no network interface of this host has the address {address}", f"it has {names}")
    return known[address]


def _interfaces_by_address() -> dict[str, str]:
    """Return the interface of each IPv4 address, secondary addresses included."""
    data = array.array("B", bytes(_IFREQ_BYTES * _MOST_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iP", len(data), data.buffer_info()[0]))
    size, _ = struct.unpack("iP", answer)
    entries = [data[start : start + _IFREQ_BYTES].tobytes() for start in range(0, size, _IFREQ_BYTES)]
    # An alias such as `eth0:1` is a label of an address, not an interface.
    return {socket.inet_ntoa(entry[20:24]): entry[:16].split(b"\0")[0].decode().split(":")[0] for entry in entries}


def adapters() -> list[str]:
    """Return the names of the RDMA adapters."""
    return sorted(path.name for path in ADAPTERS.iterdir()) if ADAPTERS.is_dir() else []


def own_address(device: str | None) -> str:
    """Return the IPv4 address that peers connect to. device: an interface, a host name or an address of this host.

    None means the loopback address. Raises TransportError if this host does not have it.
    """
    if device is None:
        return LOOPBACK
    known = interfaces()
    if device in known:
        if not known[device]:
            raise TransportError(f"interface {device} has no IPv4 address", hint=f"ip addr add ADDRESS dev {device}")
        return known[device]
    if device in adapters():
        raise TransportError(f"{device} is an RDMA adapter, not a network interface", hint="use the protocol RDMA")
    try:
        address = socket.gethostbyname(device)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
    except OSError as error:
        names = ", ".join(f"{name} {address}".strip() for name, address in known.items())
        raise TransportError(
            f"this host has no interface and no address {device!r}",
            f"{error}; it has {names}",
            did_you_mean(device, known),
        ) from error
    return address


def check_adapters(device: str | None) -> None:
    """Raise TransportError if an RDMA adapter is missing. device: names separated by commas; None: any adapter."""
    known = adapters()
    if not known:
        raise TransportError(
            "this host has no RDMA adapter",
            f"{ADAPTERS} is missing or empty",
            "use the protocol TCP, or SHM on one host",
        )
    for name in device.split(",") if device else ():
        if name in known:
            _check_link(name)
            continue
        is_interface = name in interfaces()
        what = f"{name} is a network interface, not an RDMA adapter" if is_interface else f"no RDMA adapter {name!r}"
        raise TransportError(what, f"this host has {', '.join(known)}", did_you_mean(name, known))


def _check_link(adapter: str) -> None:
    """Raise TransportError if no port of an adapter is active. States that cannot be read are left to the engine."""
    states = [path.read_text(encoding="ascii").strip() for path in ADAPTERS.glob(f"{adapter}/ports/*/state")]
    if states and not any(state.endswith("ACTIVE") for state in states):
        raise TransportError(
            f"no port of RDMA adapter {adapter} is active", ", ".join(states), "connect it, or choose another adapter"
        )


def transfer_engine() -> ModuleType:
    """Import Mooncake's transfer engine. Raises TransportError with the package to install."""
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise TransportError(
            "Mooncake's transfer engine is not installed", str(error), "pip install 'mstarctl[mooncake]'"
        ) from error
    except ImportError as error:  # the wheel is there, and a library that it needs is not
        is_cuda = "libcuda" in str(error)
        hint = "install mooncake-transfer-engine-non-cuda in place of the package that needs CUDA"
        raise TransportError(
            "Mooncake's transfer engine cannot be loaded",
            str(error),
            hint if is_cuda else f"apt-get install {SYSTEM_LIBRARIES}",
        ) from error


def free_ports(address: str, count: int, ports: tuple[int, int] | None = None) -> list[int]:
    """Return TCP ports that are free at an address now. ports: first and last that may be used; None: any.

    Another process may take one before it is used. Raises TransportError if there are not enough.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    choices = (
        _any_ports(count) if ports is None else random.sample(range(ports[0], ports[1] + 1), ports[1] - ports[0] + 1)
    )
    held: list[socket.socket] = []
    try:
        for port in choices:
            if len(held) == count:
                break
            sock = socket.socket(family, socket.SOCK_STREAM)
            held.append(sock)
            try:
                sock.bind((address, port))
            except OSError:
                held.pop().close()
        if len(held) < count:
            where = "" if ports is None else f" in {ports[0]}-{ports[1]}"
            raise TransportError(f"too few ports are free at {address}", f"{count} are needed{where}", "see ray.ports")
        return [sock.getsockname()[1] for sock in held]
    finally:
        for sock in held:
            sock.close()


def _any_ports(count: int) -> list[int]:
    """Return ports to try: first those that no outgoing connection takes, then what the kernel chooses."""
    try:
        end = int(_OUTGOING.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        end = 0
    below = range(max(_PRIVILEGED, end - _TRIED), max(_PRIVILEGED, end))
    return [*random.sample(below, len(below)), *[0] * count]
