"""Checks of `mstarctl doctor --ray`: what each host of a Ray cluster lacks for a deployment."""

from __future__ import annotations

import ipaddress
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Final

from mstar_core.cluster.facts import ClusterView, HostFacts
from mstarctl.commands.finding import FAILED, NA, OK, WARN, Finding
from mstarctl.objects.cluster import compared_packages
from mstarctl.output import size_text
from mstarctl.output.units import counted
from mstarctl.start.hosts.versions import compared

LITTLE_MEMORY: Final = 4 << 30
PROBED_PORT: Final = 40_000
"""A port from the middle of those that Linux gives to sockets that name none."""

PROBE_S: Final = 1.0

Reach = Callable[[str], float | None]
"""Returns the seconds until a host answers at an unused port, None if nothing comes back."""


def ray_findings(address: str) -> Iterator[Finding]:
    """Survey a cluster and run every check. Raises ConfigError without Ray, Unreachable without a cluster."""
    from mstar_core.cluster.survey import survey

    names = compared_packages()
    yield from cluster_findings(survey(address, names), here(names), reach)


def here(distributions: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of this host, with which those of the others are compared."""
    versions = {"python": platform.python_version()}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def reach(address: str) -> float | None:
    """Connect to a port that nothing uses: a host that refuses lets packets through, a firewall answers nothing."""
    began = time.monotonic()
    try:
        socket.create_connection((address, PROBED_PORT), timeout=PROBE_S).close()
    except ConnectionRefusedError:
        pass
    except OSError:
        return None
    return time.monotonic() - began


def cluster_findings(view: ClusterView, needed: Mapping[str, str], reach: Reach) -> Iterator[Finding]:
    """Run every check. needed: versions of this host by name."""
    local = next((host for host in view.hosts if host.is_local), None)
    yield Finding(
        name="ray",
        state=OK if local is not None else FAILED,
        detail=f"Ray {view.version} at {view.address}, {counted(len(view.hosts), 'host')}"
        + ("" if local is not None else f"; this host is not one of them: ray start --address={view.address}"),
    )
    is_alone = len(view.hosts) == 1
    for host in view.hosts:
        if host.fault:
            yield Finding(name=host.name, state=FAILED, detail=host.fault)
            continue
        yield _versions(host, needed)
        yield _plugins(host, needed)
        yield _cuda(host, local)
        yield _gpus(host)
        yield _memory(host)
        yield _address(host, is_alone=is_alone)
        if not host.is_local:
            yield _ports(host, reach)


def _versions(host: HostFacts, needed: Mapping[str, str]) -> Finding:
    names = [name for name in ("mstarctl", "ray", "python") if name in needed]
    others = [name for name in names if compared(name, host.versions.get(name, "")) != compared(name, needed[name])]
    shown = ", ".join(f"{name} {host.versions.get(name) or 'missing'}" for name in others or names)
    detail = f"{shown}; this host has {', '.join(f'{name} {needed[name]}' for name in others)}" if others else shown
    return Finding(name=f"{host.name} versions", state=FAILED if others else OK, detail=detail)


def _plugins(host: HostFacts, needed: Mapping[str, str]) -> Finding:
    names = sorted(needed.keys() - {"mstarctl", "ray", "python"})
    if not names:
        return Finding(name=f"{host.name} plugins", state=NA, detail="this host has none to compare with")
    others = [name for name in names if host.versions.get(name) != needed[name]]
    if not others:
        shown = ", ".join(f"{name} {needed[name]}" for name in names)
        return Finding(name=f"{host.name} plugins", state=OK, detail=shown)
    differ = ", ".join(f"{name} {host.versions.get(name) or 'missing'}" for name in others)
    install = " ".join(f"{name}=={needed[name]}" for name in others)
    return Finding(
        name=f"{host.name} plugins", state=WARN, detail=f"{differ}; their models need there: pip install {install}"
    )


def _cuda(host: HostFacts, local: HostFacts | None) -> Finding:
    there, wanted = host.versions.get("cuda"), None if local is None else local.versions.get("cuda")
    if there is None:
        return Finding(name=f"{host.name} cuda", state=NA, detail="no driver")
    is_other = wanted is not None and there != wanted
    detail = f"driver for CUDA {there}" + (f"; that of this host is for {wanted}" if is_other else "")
    return Finding(name=f"{host.name} cuda", state=WARN if is_other else OK, detail=detail)


def _gpus(host: HostFacts) -> Finding:
    if not host.gpus:
        return Finding(name=f"{host.name} gpus", state=NA, detail="none found; ranks run on the CPU")
    parts = [
        f"{gpu.index} {gpu.name}, {size_text(gpu.free_bytes)} free of {size_text(gpu.total_bytes)}"
        + (f", held by deployment {gpu.holder}" if gpu.holder else "")
        + ("" if gpu.is_offered else ", not offered by Ray")
        for gpu in host.gpus
    ]
    free = f"{host.free_gpus:g} of {host.gpu_count:g} not reserved in Ray"
    is_little = not host.free_gpus or not any(gpu.is_offered and not gpu.holder for gpu in host.gpus)
    return Finding(name=f"{host.name} gpus", state=WARN if is_little else OK, detail=f"{free}: {'; '.join(parts)}")


def _memory(host: HostFacts) -> Finding:
    state = OK if host.memory_free >= LITTLE_MEMORY else WARN
    return Finding(name=f"{host.name} memory", state=state, detail=f"{size_text(host.memory_free)} available")


def _address(host: HostFacts, *, is_alone: bool) -> Finding:
    name = f"{host.name} network"
    interface = next((name for name, address in host.interfaces.items() if address == host.address), "")
    where = f"{host.address}{f' on {interface}' if interface else ''}"
    rdma = f"; RDMA: {', '.join(host.adapters)}" if host.adapters else ""
    try:
        address = ipaddress.ip_address(host.address)
    except ValueError:
        return Finding(name=name, state=WARN, detail=f"{where} is a name; ray start --node-ip-address sets an address")
    if address.is_loopback and not is_alone:
        hint = "ray start --node-ip-address sets another, or ray.network"
        return Finding(name=name, state=WARN, detail=f"{where} is reached from the host itself alone; {hint}")
    if not address.is_private and not address.is_loopback:
        hint = "Ray has no passwords: its ports must be closed to others"
        return Finding(name=name, state=WARN, detail=f"{where} is a public address; {hint}")
    return Finding(name=name, state=OK, detail=f"{where}{rdma}")


def _ports(host: HostFacts, reach: Reach) -> Finding:
    took_s = reach(host.address)
    if took_s is None:
        detail = f"nothing comes back from {host.address}:{PROBED_PORT}; open a range, and name it in ray.ports"
        return Finding(name=f"{host.name} ports", state=WARN, detail=detail)
    return Finding(
        name=f"{host.name} ports", state=OK, detail=f"{host.address}:{PROBED_PORT} answers in {1000 * took_s:.1f} ms"
    )
