"""Placement of a deployment's ranks on the hosts of a cluster. Used by the planner of `up`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from mstar_core.cluster.facts import HostFacts, HostGpu
from mstar_core.config.deployment import HostPlan, Plan, RankPlan
from mstar_core.config.hosts import CPU
from mstar_core.config.packing import pack
from mstar_core.config.scaling import MOST_RANKS, FreeDevice, columns_by_kind, with_replicas
from mstar_core.errors import ConfigError
from mstar_core.host.hardware.gpus import Gpu
from mstarctl.output.units import counted
from mstarctl.start.hardware.choice import auto_count
from mstarctl.start.hardware.devices import Devices
from mstarctl.start.hosts.cluster import Cluster
from mstarctl.start.hosts.network import address_of
from mstarctl.start.hosts.offer import Slot, free_gpus, named_slots

Planner = Callable[[Sequence[str]], Plan]
"""Places the model on devices: entry i for rank i, or ("cpu",) for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlacement:
    """A plan whose ranks have hosts. slots: device of each rank. hosts: the supervisor's first."""

    devices: Devices
    plan: Plan
    slots: Mapping[int, Slot]
    hosts: tuple[HostPlan, ...]

    @property
    def gpus(self) -> dict[str, HostGpu]:
        """The GPUs by the place of their ranks."""
        return {rank.place: gpu for rank in self.plan.ranks if (gpu := self.slots[rank.rank].gpu) is not None}

    @property
    def local_keys(self) -> dict[str, str]:
        """Lock keys of the devices of the supervisor's host."""
        return {rank.device: self.gpus[rank.place].key for rank in self.plan.ranks if _is_local_gpu(rank)}

    @property
    def keys(self) -> dict[str, str]:
        """Key of each GPU in `cards` by place. Keys of other hosts are places, which no process of this host has."""
        return {place: self.local_keys.get(place, place) for place in self.gpus}

    @property
    def cards(self) -> list[Gpu]:
        """The GPUs of all hosts as the checks of capacity read them."""
        return [
            Gpu(name=gpu.name, driver="", free=gpu.free_bytes, total=gpu.total_bytes, uuid=self.keys[place])
            for place, gpu in self.gpus.items()
        ]

    @property
    def used_hosts(self) -> list[HostFacts]:
        """The hosts of ranks."""
        return list({slot.host.node: slot.host for slot in self.slots.values()}.values())


def _is_local_gpu(rank: RankPlan) -> bool:
    return not rank.host and rank.device != CPU


def scaled(plan: Plan, replicas: int | None, names: Sequence[str]) -> Plan:
    """Return the plan with this number of replicas; None: unchanged. names: devices of the deployment."""
    if replicas is None:
        return plan
    used = {rank.device for rank in plan.ranks}
    free = [FreeDevice(name=name, key="", free_bytes=0) for name in dict.fromkeys(names) if name not in used]
    return with_replicas(plan, replicas, [device for device in free if device.name != CPU]).plan


def place(cluster: Cluster, planner: Planner) -> HostPlacement:
    """Return where the ranks run. Raises ConfigError or UsageError if the hosts lack the devices."""
    named = named_slots(cluster.named, cluster.offer, cluster.fault)
    kind = _kind(cluster, named)
    devices, plan, slots = _on_cpu(cluster, named, planner) if kind == CPU else _on_gpus(cluster, named, planner)
    ranks = tuple(
        msgspec.structs.replace(rank, host=_name(slots[rank.rank].host), device=slots[rank.rank].device)
        for rank in plan.ranks
    )
    plan = msgspec.structs.replace(plan, ranks=ranks)
    return HostPlacement(devices=devices, plan=plan, slots=slots, hosts=_host_plans(cluster, plan))


def _name(host: HostFacts) -> str:
    return "" if host.is_local else host.name


def _kind(cluster: Cluster, named: Sequence[Slot]) -> str:
    """Return `cpu` or `cuda`: as requested, else GPUs if a host offers one."""
    kinds = {CPU if slot.gpu is None else "cuda" for slot in named}
    asked = cluster.options.device
    if len(kinds) > 1 or (asked is not None and kinds and str(asked) not in kinds):
        what = f"--device is {asked}" if len(kinds) == 1 else "all ranks compute on the same kind of device"
        raise cluster.fault("the listed devices are of two kinds", what, "list GPUs alone, or HOST:cpu alone")
    return str(asked) if asked is not None else next(iter(kinds), "cuda" if cluster.offer.gpu_count else CPU)


def _on_cpu(cluster: Cluster, named: Sequence[Slot], planner: Planner) -> tuple[Devices, Plan, dict[int, Slot]]:
    if cluster.options.gpus is not None and not named:
        raise cluster.fault("--gpus auto and --device cpu exclude each other", hint="omit one of them")
    plan = scaled(planner((CPU,)), cluster.options.replicas, ())
    devices = Devices(names=(CPU,), why=_why(cluster, named, "no host offers a GPU"))
    numbers = [rank.rank for rank in plan.ranks]
    if len(named) == 1:
        return devices, plan, dict.fromkeys(numbers, named[0])
    if named:
        if len(named) < len(numbers):
            raise cluster.fault(
                f"no device is listed for rank {len(named)}",
                f"{counted(len(named), 'device')} for {counted(len(numbers), 'rank')}",
                "list one for each rank, or one HOST:cpu for all",
            )
        return devices, plan, dict(zip(numbers, named, strict=False))
    sizes = {rank: str(rank) for rank in numbers}  # each rank is a device of its own
    hosts = _packed(cluster, plan, sizes, dict.fromkeys((host.node for host in cluster.offer.hosts), MOST_RANKS))
    by_node = {host.node: host for host in cluster.offer.hosts}
    return devices, plan, {rank: Slot(host=by_node[hosts[device]]) for rank, device in sizes.items()}


def _on_gpus(cluster: Cluster, named: Sequence[Slot], planner: Planner) -> tuple[Devices, Plan, dict[int, Slot]]:
    """Plan on numbered devices, one for each distinct GPU, and replace them by the GPUs of hosts."""
    offer = cluster.offer
    distinct = {(slot.host.node, slot.device): slot for slot in named}
    order = list(distinct)
    numbers = [order.index((slot.host.node, slot.device)) for slot in named] or list(range(_count(cluster)))
    names = tuple(f"cuda:{number}" for number in numbers)
    try:
        plan = scaled(planner(names), cluster.options.replicas, names)
    except ConfigError as error:
        if error.facts.get("key") == "replicas":
            error.detail = offer.text()
        elif not named and len(names) < cluster.config.rank_count:
            error.detail = f"{error.detail}\n{offer.text()}"
        raise
    devices = Devices(names=names, why=_why(cluster, named, f"{counted(offer.gpu_count, 'GPU')} free in the cluster"))
    by_rank = {rank.rank: rank.device for rank in plan.ranks}
    if named:
        slots = {f"cuda:{number}": slot for number, slot in enumerate(distinct.values())}
        return devices, plan, {rank: slots[device] for rank, device in by_rank.items()}
    free = {host.node: free_gpus(host) for host in offer.hosts}
    hosts = _packed(cluster, plan, by_rank, {node: len(gpus) for node, gpus in free.items()})
    by_node = {host.node: host for host in offer.hosts}
    slots = {device: Slot(host=by_node[node], gpu=free[node].pop(0)) for device, node in hosts.items()}
    return devices, plan, {rank: slots[device] for rank, device in by_rank.items()}


def _count(cluster: Cluster) -> int:
    """Return the number of GPUs that the deployment may use. Raises ConfigError if the cluster does not have them."""
    free = cluster.offer.gpu_count
    asked = auto_count(cluster.options.gpus)
    if not free or (asked is not None and not 1 <= asked <= free):
        what = f"{counted(asked, 'GPU')} of the cluster are requested" if asked else "the cluster offers no GPU"
        raise cluster.fault(what, cluster.offer.text(), f"--gpus auto:{free}" if free else "use --device cpu")
    return free if asked is None else asked


def _why(cluster: Cluster, named: Sequence[Slot], otherwise: str) -> str:
    if named:
        return "as listed"
    return "as requested" if cluster.options.device is not None else otherwise


def _packed(cluster: Cluster, plan: Plan, devices: Mapping[int, str], room: Mapping[str, int]) -> dict[str, str]:
    """Return the node of each device. devices: by rank. room: devices by node, the local one first.

    Columns of a replica stay together. If a kind of column has fewer replicas than another, each of its columns stays
    with the first of those that it serves.
    """
    kinds = list(columns_by_kind(plan).values())
    most = max(len(columns) for columns in kinds)
    replicas: list[list[list[str]]] = [[] for _ in range(most)]
    seen: set[str] = set()
    for columns in kinds:
        for index, column in enumerate(columns):
            new = [name for name in dict.fromkeys(devices[rank] for rank in column) if name not in seen]
            seen.update(new)
            replicas[index * most // len(columns)].append(new)
    sizes = [[len(column) for column in columns] for columns in replicas]
    packed = pack(sizes, room, {cluster.local.node: 0}, spread=cluster.config.ray.spread)
    return {
        name: node
        for columns, nodes_of_columns in zip(replicas, packed, strict=True)
        for column, nodes in zip(columns, nodes_of_columns, strict=True)
        for name, node in zip(column, nodes, strict=True)
    }


def _host_plans(cluster: Cluster, plan: Plan) -> tuple[HostPlan, ...]:
    """Return the hosts of the plan, the supervisor's first."""
    used = {rank.host for rank in plan.ranks}
    hosts = [host for host in cluster.offer.hosts if host.is_local or host.name in used]
    return tuple(
        HostPlan(name=_name(host), address=address_of(host, cluster.config), title=host.name, node=host.node)
        for host in hosts
    )
