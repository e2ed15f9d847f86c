"""Changes of the number of replicas in a plan. Called by the supervisor for `mstarctl scale`.

A column is a set of ranks that form one replica: those of its tensor-parallel groups, and nodes placed on the same
ranks. Columns with the same nodes are replicas of each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from mstar_core.config.deployment import NodePlacement, Plan
from mstar_core.errors import ConfigError

MOST_RANKS: Final = 1024
"""Most ranks of a deployment, as in a deployment file."""

Column = tuple[int, ...]
"""Ranks of a replica, ascending."""


class FreeDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that no deployment uses. name: `cuda:INDEX`; key: of its lock."""

    name: str
    key: str
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A plan with another number of replicas. added, removed: columns. copied: the model of each added rank."""

    plan: Plan
    added: tuple[Column, ...] = ()
    removed: tuple[Column, ...] = ()
    copied: tuple[tuple[int, int], ...] = ()


def with_replicas(plan: Plan, replicas: int, free: Sequence[str] = (), first: int = 0) -> Change:
    """Return the plan with this number of replicas of every node.

    free: devices that no rank uses; each new rank on a GPU takes one. first: least number of a new rank, so that no
    number of a removed rank comes back. The last replicas are removed first. Raises ConfigError for less than one
    replica, for replicas that differ, and if devices are missing.
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
    copies = [columns[-1] for columns in kinds for _ in range(replicas - len(columns))]
    smaller = without(plan, {rank for column in removed for rank in column})
    return _grown(smaller, copies, list(free), max(first, *(rank.rank + 1 for rank in plan.ranks)), tuple(removed))


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


def _grown(plan: Plan, copies: list[Column], free: list[str], number: int, removed: tuple[Column, ...]) -> Change:
    """Return the plan with a copy of each of these columns. number: the first new rank."""
    devices = {rank.rank: rank.device for rank in plan.ranks}
    needed = sum(devices[rank] != "cpu" for column in copies for rank in column)
    if needed > len(free):
        detail = f"{needed} GPUs are needed, one for each new rank; {', '.join(free) or 'none'} is free"
        raise ConfigError("no device is free for the new replicas", detail, "ask for fewer replicas", key="replicas")
    added: list[Column] = []
    pairs: list[tuple[int, int]] = []
    for column in copies:
        names = {rank: number + offset for offset, rank in enumerate(column)}
        number += len(column)
        added.append(tuple(names.values()))
        pairs += [(new, old) for old, new in names.items()]
        plan = _with_copy(plan, names, {rank: "cpu" if devices[rank] == "cpu" else free.pop(0) for rank in column})
    return Change(plan=plan, added=tuple(added), removed=removed, copied=tuple(pairs))


def _with_copy(plan: Plan, names: dict[int, int], devices: dict[int, str]) -> Plan:
    """Return the plan with a copy of some ranks. names: new rank by old one. devices: of the copies, by old rank."""

    def renamed(ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(names[rank] for rank in ranks)

    def copied(place: NodePlacement) -> NodePlacement:
        new = tuple(renamed(replica) for replica in place.replicas if replica[0] in names)
        return msgspec.structs.replace(place, replicas=(*place.replicas, *new))

    copies = (
        msgspec.structs.replace(each, rank=names[each.rank], device=devices[each.rank])
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


def _kinds(plan: Plan) -> list[list[Column]]:
    """Return the columns of each kind, by their nodes. Raises ConfigError if replicas of a node differ."""
    kinds: dict[tuple[tuple[int, int], ...], list[Column]] = {}
    for column in _columns(plan):
        counts = (sum(r[0] in column for r in place.replicas) for place in plan.placements)
        nodes = tuple((index, count) for index, count in enumerate(counts) if count)
        kinds.setdefault(nodes, []).append(column)
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
