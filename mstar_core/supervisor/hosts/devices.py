"""Devices of ranks on the hosts of a cluster: room to reserve, and the indices that were reserved."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mstar_core.cluster.placer import Bundle
from mstar_core.config.deployment import DeploymentSpec, HostPlan, Plan
from mstar_core.config.hosts import host_device
from mstar_core.errors import StartError

CUDA = "cuda:"
OWN_PROCESSES = 2
"""Processes of the supervisor's host that have no rank: conductor and api."""


def bundle_of(spec: DeploymentSpec, host: HostPlan) -> Bundle:
    """Return the room that a deployment needs on a host: its GPUs, and a core for each process."""
    ranks = [rank for rank in spec.plan.ranks if rank.host == host.name]
    gpus = {rank.device for rank in ranks if rank.device.startswith(CUDA)}
    processes = len(ranks) + (0 if host.name else OWN_PROCESSES)
    return Bundle(
        host=host.name,
        gpus=len(gpus),
        cpus=float(processes),
        node=host.node,
        address=host.address,
        network=spec.ray.network or "",
    )


def with_reserved(spec: DeploymentSpec, gpus: Mapping[str, tuple[int, ...]]) -> Plan:
    """Return the plan with the reserved GPUs. gpus: indices by host; a host that is missing keeps its devices.

    Raises StartError if fewer were reserved than the plan uses, or others than the configuration names.
    """
    names: dict[tuple[str, str], str] = {}
    for host, reserved in gpus.items():
        ranks = [rank for rank in spec.plan.ranks if rank.host == host and rank.device.startswith(CUDA)]
        planned = sorted({int(rank.device.removeprefix(CUDA)) for rank in ranks})
        if len(reserved) < len(planned):
            detail = f"the plan uses {len(planned)}, {len(reserved)} were reserved"
            raise StartError(f"too few GPUs were reserved on host {_title(spec, host)}", detail, phase="plan")
        kept = [index for index in planned if index in reserved]
        rest = [index for index in reserved if index not in kept]
        for index in planned:
            new = index if index in kept else rest.pop(0)
            names[host, f"{CUDA}{index}"] = f"{CUDA}{new}"
    for rank in spec.plan.ranks:
        new_device = names.get((rank.host, rank.device), rank.device)
        if new_device != rank.device and _is_named(spec, rank.rank):
            raise StartError(
                f"GPU {rank.device.removeprefix(CUDA)} of host {_title(spec, rank.host)} was not reserved",
                f"Ray assigned {new_device.removeprefix(CUDA)} in its place",
                "name the host without an index in ray.devices, or free that GPU",
                phase="plan",
            )
    ranks_now = (
        msgspec.structs.replace(rank, device=names.get((rank.host, rank.device), rank.device))
        for rank in spec.plan.ranks
    )
    return msgspec.structs.replace(spec.plan, ranks=tuple(ranks_now))


def _is_named(spec: DeploymentSpec, rank: int) -> bool:
    """Whether the configuration names the GPU of a rank by its index."""
    if rank >= len(spec.ray.devices):
        return False
    device = host_device(spec.ray.devices[rank])
    return device is not None and device.index is not None


def _title(spec: DeploymentSpec, host: str) -> str:
    return next((each.title or each.name for each in spec.hosts if each.name == host), host) or "of the supervisor"
