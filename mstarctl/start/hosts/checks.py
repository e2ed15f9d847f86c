"""Checks of the hosts that a plan uses, and warnings about the traffic between them. Called by the planner of `up`."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

from mstar_core.cluster.facts import HostFacts
from mstar_core.config.deployment import HostPlan, Plan
from mstar_core.config.hosts import CPU
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.errors import WeightsError, did_you_mean
from mstarctl.output.units import counted
from mstarctl.start.hosts.cluster import Cluster
from mstarctl.start.hosts.placement import HostPlacement
from mstarctl.start.options import absolute

PORTS_OF_PROCESS: Final = 2
"""Ports of a process for other hosts: of its mailbox, and of its tensors."""

PROCESSES: Final = 3
"""Processes of the supervisor's host beside its ranks: supervisor, api and conductor."""


def check_hosts(cluster: Cluster, placement: HostPlacement) -> None:
    """Raise ConfigError or WeightsError, with the host's name, for what a host of the plan lacks."""
    config, hosts = cluster.config, [cluster.host(host.name) for host in placement.hosts]
    _check_weights(config, hosts)
    _check_addresses(config, placement.hosts)
    _check_ports(config, placement.plan)
    if config.transport.protocol != "SHM":
        _check_device(config, placement.used_hosts)


def _check_weights(config: ResolvedConfig, hosts: Sequence[HostFacts]) -> None:
    folder = absolute(config.weights)
    for host in hosts:
        if folder is not None and folder in host.missing and not host.is_local:
            raise WeightsError(
                f"host {host.name} has no folder {folder} that can be read",
                "each host reads the weights of its ranks itself",
                "copy them to the same path there, mount it, or use other hosts",
                file=folder,
            )


def _check_addresses(config: ResolvedConfig, hosts: Sequence[HostPlan]) -> None:
    """Refuse a loopback address beside addresses of a network, which hosts other than its own cannot reach."""
    local = [host for host in hosts if ipaddress.ip_address(host.address).is_loopback]
    if local and len(local) < len(hosts):
        raise config.error(
            "ray.network",
            f"other hosts cannot reach host {local[0].title}",
            f"its address in the Ray cluster is {local[0].address}",
            "set ray.network to the interface or the network between the hosts",
            at="ray.address",
        )


def _check_ports(config: ResolvedConfig, plan: Plan) -> None:
    ports = config.ray.port_range
    if ports is None:
        return
    on_host = {name: sum(rank.host == name for rank in plan.ranks) for name in {rank.host for rank in plan.ranks}}
    local = PROCESSES + on_host.pop("", 0)
    least = PORTS_OF_PROCESS * max([local, *(1 + count for count in on_host.values())])
    if ports[1] - ports[0] + 1 < least:
        raise config.error(
            "ray.ports",
            f"ray.ports {config.ray.ports} has {counted(ports[1] - ports[0] + 1, 'port')}",
            f"the processes of one host need {least}",
            "give a larger range",
        )


def _check_device(config: ResolvedConfig, hosts: Sequence[HostFacts]) -> None:
    """Refuse an interface or an adapter that a host does not have."""
    device, is_rdma = config.transport.device, config.transport.protocol == "RDMA"
    for host in hosts if device is not None else ():
        known = host.adapters if is_rdma else [name for name, address in host.interfaces.items() if address]
        for name in (device or "").split(",") if is_rdma else [device or ""]:
            if name not in known:
                what = "RDMA adapter" if is_rdma else "interface"
                raise config.error(
                    "transport.device",
                    f"host {host.name} has no {what} {name!r}",
                    f"it has {', '.join(known) or 'none'}",
                    did_you_mean(name, known) if known else f"use an {what} that all hosts of the plan have",
                )


def host_cautions(cluster: Cluster, plan: Plan) -> tuple[str, ...]:
    """Return warnings about hosts that are left out and about tensors between hosts."""
    cautions = [f"host {name} is left out: {why}" for name, why in cluster.offer.refused.items()]
    hosts = {rank.rank: rank.host for rank in plan.ranks}
    for group in plan.groups:
        if len({hosts[rank] for rank in group.ranks}) > 1:
            ranks = ", ".join(map(str, group.ranks))
            cautions.append(
                f"ranks {ranks} are one tensor-parallel group on several hosts: each step crosses a network"
            )
    if cluster.config.transport.protocol == "SHM" and crosses(plan):
        cautions.append(
            "tensors between GPUs of different hosts pass through host memory:"
            " --tensor-comm-protocol TCP or RDMA sends them directly"
        )
    return tuple(cautions)


def crosses(plan: Plan) -> bool:
    """Return whether GPU ranks on different hosts exchange tensors, because a host lacks a node that another has."""
    ranks = {rank.rank: rank for rank in plan.ranks}
    hosts = [{ranks[replica[0]].host for replica in place.replicas} for place in plan.placements]
    return any(rank.device != CPU for rank in plan.ranks) and any(hosts[0] != others for others in hosts[1:])
