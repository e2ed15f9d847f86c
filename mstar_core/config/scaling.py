"""Changes of the number of replicas in a plan. Called by `up --replicas`, and by the supervisor for `mstarctl scale`.

A column is a set of ranks that form one replica: those of its tensor-parallel groups, and nodes placed on the same
ranks. Columns with the same nodes are replicas of each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from mstar_core.config.deployment import NodePlacement, Plan
from mstar_core.config.hosts import CPU
from mstar_core.config.packing import pack
from mstar_core.errors import ConfigError

MOST_RANKS: Final = 1024
"""Most ranks of a deployment, as in a deployment file."""

Column = tuple[int, ...]
"""Ranks of a replica, ascending."""

Kind = tuple[tuple[int, int], ...]
"""Number of uses of each placement, by its index."""


class FreeDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that no deployment uses. name: `cuda:INDEX`; key: of its lock. host: as in `RankPlan`."""

    name: str
    key: str
    free_bytes: int
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A plan with another number of replicas. added, removed: columns. copied: the model of each added rank."""

    plan: Plan
    added: tuple[Column, ...] = ()
    removed: tuple[Column, ...] = ()
    copied: tuple[tuple[int, int], ...] = ()


def with_replicas(
    plan: Plan,
    replicas: int,
    free: Sequence[FreeDevice] = (),
    first: int = 0,
    *,
    hosts: Sequence[str] = ("",),
    spread: bool = False,
) -> Change:
    """Return the plan with this number of replicas of every node.

    free: GPUs that no rank uses; each new rank on a GPU takes one. first: least number of a new rank, so that no
    number of a removed rank comes back. hosts: those of the deployment. spread: put new replicas on the hosts with the
    fewest; otherwise new ranks on the CPU share the host of the rank that they copy, and GPUs are taken from as few
    hosts as possible. The last replicas are removed first. Raises ConfigError for less than one replica, for replicas
    that differ, and if devices are missing.
    """
    if replicas < 1:
        hint = "mstarctl drain refuses requests and keeps the processes; mstarctl down ends them"
        raise ConfigError(f"a deployment cannot have {replicas} replicas", hint=hint, key="replicas")
    kinds = _kinds(plan)
    if replicas > MOST_RANKS:
        raise ConfigError(
            f"a deployment cannot have {replicas} replicas", f"at most {MOST_RANKS} ranks", key="replicas"
        )
    removed = [column for columns in kinds for column in columns[replicas:]]
    copies = [(columns[-1], number) for columns in kinds for number in range(len(columns), replicas)]
    smaller = without(plan, {rank for column in removed for rank in column})
    _check_devices(plan, [column for column, _ in copies], free)
    load = Counter(host for column in kinds[0][:replicas] for host in {_host_of(plan, rank) for rank in column})
    targets = _placed(plan, copies, free, hosts, load, spread=spread)
    number = max(first, *(rank.rank + 1 for rank in plan.ranks))
    return _grown(smaller, [column for column, _ in copies], targets, number, tuple(removed))


def without(plan: Plan, ranks: set[int]) -> Plan:
    """Return the plan without these ranks."""
    placements = (
        msgspec.structs.replace(
            place, replicas=tuple(replica for replica in place.replicas if not ranks.intersection(replica))
        )
        for place in plan.placements
    )
    return Plan(
        ranks=tuple(rank for rank in plan.ranks if rank.rank not in ranks),
        placements=tuple(placements),
        groups=tuple(group for group in plan.groups if not ranks.intersection(group.ranks)),
    )


def _host_of(plan: Plan, rank: int) -> str:
    return next(each.host for each in plan.ranks if each.rank == rank)


def _check_devices(plan: Plan, copies: Sequence[Column], free: Sequence[FreeDevice]) -> None:
    """Raise ConfigError if there are fewer free GPUs than new ranks on GPUs."""
    on_gpu = {rank.rank for rank in plan.ranks if rank.device != CPU}
    needed = sum(rank in on_gpu for column in copies for rank in column)
    if needed > len(free):
        names = ", ".join(f"{device.host} {device.name}".lstrip() for device in free) or "none"
        detail = f"{needed} GPUs are needed, one for each new rank; {names} is free"
        raise ConfigError("no device is free for the new replicas", detail, "ask for fewer replicas", key="replicas")


def _placed(
    plan: Plan,
    copies: Sequence[tuple[Column, int]],
    free: Sequence[FreeDevice],
    hosts: Sequence[str],
    load: Mapping[str, int],
    *,
    spread: bool,
) -> list[list[tuple[str, str]]]:
    """Return host and device of each rank of each copied column. copies: columns with the number of their replica."""
    on_gpu = {rank.rank for rank in plan.ranks if rank.device != CPU}
    places = [[(_host_of(plan, rank), CPU) for rank in column] for column, _ in copies]
    is_cpu = on_gpu.isdisjoint(rank for column, _ in copies for rank in column)
    if is_cpu and not spread:
        return places
    names: dict[str, list[str]] = {
        host: [device.name for device in free if device.host == host]
        for host in dict.fromkeys((*hosts, *(device.host for device in free)))
    }
    by_replica: dict[int, list[int]] = {}
    for index, (_, number) in enumerate(copies):
        by_replica.setdefault(number, []).append(index)
    moved = [[rank for rank in column if is_cpu or rank in on_gpu] for column, _ in copies]
    packed = pack(
        [[len(moved[index]) for index in columns] for columns in by_replica.values()],
        {host: MOST_RANKS if is_cpu else len(devices) for host, devices in names.items()},
        load,
        spread=spread,
    )
    targets: dict[int, dict[int, str]] = {
        index: dict(zip(moved[index], targets, strict=True))
        for columns, hosts_of_columns in zip(by_replica.values(), packed, strict=True)
        for index, targets in zip(columns, hosts_of_columns, strict=True)
    }
    return [
        [
            (host, CPU if is_cpu else names[host].pop(0)) if (host := targets[index].get(rank)) is not None else place
            for rank, place in zip(column, places[index], strict=True)
        ]
        for index, (column, _) in enumerate(copies)
    ]


def _grown(
    plan: Plan,
    copies: Sequence[Column],
    targets: Sequence[Sequence[tuple[str, str]]],
    number: int,
    removed: tuple[Column, ...],
) -> Change:
    """Return the plan with a copy of each of these columns. targets: host and device by rank. number: the first new."""
    added: list[Column] = []
    pairs: list[tuple[int, int]] = []
    for column, places in zip(copies, targets, strict=True):
        names = {rank: number + offset for offset, rank in enumerate(column)}
        number += len(column)
        added.append(tuple(names.values()))
        pairs += [(new, old) for old, new in names.items()]
        plan = _with_copy(plan, names, dict(zip(column, places, strict=True)))
    return Change(plan=plan, added=tuple(added), removed=removed, copied=tuple(pairs))


def _with_copy(plan: Plan, names: dict[int, int], places: dict[int, tuple[str, str]]) -> Plan:
    """Return the plan with a copy of some ranks. names: new rank by old one. places: host and device by old rank."""

    def renamed(ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(names[rank] for rank in ranks)

    def copied(place: NodePlacement) -> NodePlacement:
        new = tuple(renamed(replica) for replica in place.replicas if replica[0] in names)
        return msgspec.structs.replace(place, replicas=(*place.replicas, *new))

    copies = (
        msgspec.structs.replace(each, rank=names[each.rank], host=places[each.rank][0], device=places[each.rank][1])
        for each in plan.ranks
        if each.rank in names
    )
    groups = (
        msgspec.structs.replace(group, ranks=renamed(group.ranks)) for group in plan.groups if group.leader in names
    )
    return Plan(
        ranks=(*plan.ranks, *copies),
        placements=tuple(map(copied, plan.placements)),
        groups=(*plan.groups, *groups),
    )


def columns_by_kind(plan: Plan) -> dict[Kind, list[Column]]:
    """Return the columns by the nodes that they hold, each kind in the order of its first rank."""
    kinds: dict[Kind, list[Column]] = {}
    for column in _columns(plan):
        counts = (sum(r[0] in column for r in place.replicas) for place in plan.placements)
        kinds.setdefault(tuple((index, count) for index, count in enumerate(counts) if count), []).append(column)
    return kinds


def _kinds(plan: Plan) -> list[list[Column]]:
    """Return the columns of each kind, by their nodes. Raises ConfigError if replicas of a node differ."""
    kinds = columns_by_kind(plan)
    seen: set[int] = set()
    for nodes in kinds:
        shared = seen & {index for index, _ in nodes}
        if shared:
            node = plan.placements[min(shared)].node
            raise ConfigError(
                f"the replicas of {node} differ",
                "they share their ranks with different nodes, so that none can be copied",
                "change node_groups in the deployment file, and start it again",
                key="node_groups",
            )
        seen |= {index for index, _ in nodes}
    return list(kinds.values())


def _columns(plan: Plan) -> Iterator[Column]:
    """Yield the sets of ranks that replicas of several ranks tie together, by their first rank."""
    ties = {rank.rank: {rank.rank} for rank in plan.ranks}
    for replica in (replica for place in plan.placements for replica in place.replicas):
        merged = set().union(*(ties[rank] for rank in replica))
        for rank in merged:
            ties[rank] = merged
    for number, tied in ties.items():
        if number == min(tied):
            yield tuple(sorted(tied))
