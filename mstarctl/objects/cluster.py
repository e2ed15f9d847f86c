"""Hosts of a Ray cluster before any deployment: data and cells of `hosts --ray`, and the packages that are compared."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from mstar_core.cluster.facts import ClusterView, HostFacts
from mstar_core.plugin.loader import plugin_entries
from mstarctl.objects.hosts import versions_text
from mstarctl.output import Column, size_text

COLUMNS: Final[tuple[Column, ...]] = (
    Column("NAME", "name"),
    Column("ADDRESS", "address"),
    Column("STATE", "state"),
    Column("CPUS FREE", "cpus_text", is_right=True),
    Column("GPUS FREE", "gpus_text", is_right=True),
    Column("PRODUCT", "product"),
    Column("MEMORY FREE", "memory", is_right=True),
    Column("VERSION", "version"),
    Column("VERSIONS", "versions_text", is_wide=True),
    Column("INTERFACES", "interfaces_text", is_wide=True),
    Column("RDMA", "adapters", is_wide=True),
    Column("RAY NODE", "node", is_wide=True),
    Column("NOTE", "fault"),
)


def compared_packages() -> tuple[str, ...]:
    """Return the distributions whose versions a survey reads: mstarctl, Ray and the plugins of this host."""
    return ("mstarctl", "ray", *sorted({entry.distribution for entry in plugin_entries()}))


def cluster_items(view: ClusterView) -> list[dict[str, Any]]:
    """Return the hosts of a cluster as data."""
    return [{**msgspec.to_builtins(host), "state": "unusable" if host.fault else "ok"} for host in view.hosts]


def cluster_cells(host: HostFacts) -> dict[str, Any]:
    """Return a host with its cells as text."""
    products = list(dict.fromkeys(gpu.name.removeprefix("NVIDIA ") for gpu in host.gpus))
    is_known = bool(host.memory_total)
    return {
        "name": host.name,
        "address": host.address,
        "state": "unusable" if host.fault else "ok",
        "cpus_text": f"{host.free_cpus:g}/{host.cpus:g}",
        "gpus_text": f"{host.free_gpus:g}/{host.gpu_count:g}" if host.gpu_count else None,
        "product": products,
        "memory": f"{size_text(host.memory_free)} of {size_text(host.memory_total)}" if is_known else None,
        "version": host.versions.get("mstarctl"),
        "versions_text": versions_text(host.versions),
        "interfaces_text": [f"{name} {address}" for name, address in host.interfaces.items() if address],
        "adapters": list(host.adapters),
        "node": host.node,
        "fault": host.fault,
    }
