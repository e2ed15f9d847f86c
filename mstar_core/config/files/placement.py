"""Node groups against a model's graph, and the plan: which rank holds which nodes on which device. Used by `up`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mstar_core.config.deployment import GroupPlan, NodePlacement, Plan, RankPlan
from mstar_core.config.files.budgets import with_budgets
from mstar_core.config.files.faults import Faults
from mstar_core.config.files.read import CheckedValue
from mstar_core.config.located import Located
from mstar_core.config.resolved import NodeGroup, ResolvedConfig
from mstar_core.errors import ConfigError, did_you_mean
from mstar_core.graph import NodeSpec, graph_nodes
from mstar_core.plugin import ModelSpec


def node_groups(spec: ModelSpec, values: Mapping[str, CheckedValue], faults: Faults) -> tuple[NodeGroup, ...]:
    """The groups of a file, names checked and walk aliases resolved. Collects the faults of each group."""
    read_groups: list[NodeGroup] = []
    for index in range(values["node_groups"].value):
        with faults.collected():
            read_groups.append(_group(spec, values, f"node_groups.{index}"))
    if faults.spoil("node_groups"):
        return ()
    groups = tuple(read_groups)
    places = {group.key: values[f"{group.key}.node_names"].place for group in groups}
    _check_twice(spec, groups, places)
    _check_gaps(groups, places)
    return groups


def _group(spec: ModelSpec, values: Mapping[str, CheckedValue], key: str) -> NodeGroup:
    names, ranks = values[f"{key}.node_names"], values[f"{key}.ranks"]
    walks, size = values.get(f"{key}.graph_walks"), values.get(f"{key}.tp_size")
    memory, device = values.get(f"{key}.memory_fraction"), values.get(f"{key}.device_gb")
    known = [node.name for node in spec.nodes]
    for index, name in enumerate(names.value):
        if name not in known:
            raise names.place.value[index].error(
                f"{spec.name} has no node {name!r}", f"{key}.node_names.{index}", hint=did_you_mean(name, known)
            )
    group = NodeGroup(
        node_names=names.value,
        ranks=ranks.value,
        graph_walks=None if walks is None or walks.value is None else _walks(spec, walks, key),
        tp_size=1 if size is None else size.value,
        key=key,
        memory_fraction=None if memory is None else memory.value,
        device_gb=None if device is None else device.value,
    )
    if walks is not None:
        _check_scope(spec, group, walks)
    if size is not None:
        _check_tp(spec, group, size)
    return group


def _walks(spec: ModelSpec, value: CheckedValue, key: str) -> tuple[str, ...]:
    known = all_walks(spec)
    walks: list[str] = []
    for index, name in enumerate(value.value):
        place, full = value.place.value[index], f"{key}.graph_walks.{index}"
        walk = spec.walk_aliases.get(name, name)
        if walk not in known:
            raise place.error(
                f"{spec.name} has no walk {name!r}", full, hint=did_you_mean(name, [*known, *spec.walk_aliases])
            )
        if walk in walks:
            raise place.error(f"{key}.graph_walks holds {walk!r} twice", full, hint="an alias counts as its walk")
        walks.append(walk)
    return tuple(walks)


def all_walks(spec: ModelSpec) -> dict[str, tuple[NodeSpec, ...]]:
    """Every walk of a model with the nodes that it uses."""
    return {
        name: tuple(dict.fromkeys(use.spec for use in graph_nodes(walk)))
        for p in spec.partitions
        for name, walk in p.walks.items()
    }


def _check_scope(spec: ModelSpec, group: NodeGroup, walks: CheckedValue) -> None:
    if group.graph_walks is None:
        return
    uses = all_walks(spec)
    for node in group.node_names:
        if not any(node in {used.name for used in uses[walk]} for walk in group.graph_walks):
            hint = f"it is used in {', '.join(walk for walk, nodes in uses.items() if node in {n.name for n in nodes})}"
            raise walks.place.error(f"no walk of {group.key} uses node {node!r}", f"{group.key}.graph_walks", hint=hint)
    for index, walk in enumerate(group.graph_walks):
        if not {used.name for used in uses[walk]}.intersection(group.node_names):
            hint = f"it uses {', '.join(used.name for used in uses[walk])}"
            raise walks.place.value[index].error(
                f"walk {walk!r} uses no node of {group.key}", f"{group.key}.graph_walks.{index}", hint=hint
            )


def _check_tp(spec: ModelSpec, group: NodeGroup, size: CheckedValue) -> None:
    key = f"{group.key}.tp_size"
    if len(group.ranks) % group.tp_size:
        raise size.place.error(
            f"{key} is {group.tp_size} and does not divide {len(group.ranks)} ranks",
            key,
            hint="use as many ranks as a multiple of it",
        )
    if group.tp_size == 1:
        return
    for name in group.node_names:
        node = spec.node(name)
        if not node.tensor_parallel:
            shared = [other.name for other in spec.nodes if other.tensor_parallel]
            hint = (
                f"tensor-parallel are: {', '.join(shared)}" if shared else f"no node of {spec.name} is tensor-parallel"
            )
            raise size.place.error(f"node {name!r} is not tensor-parallel", key, f"tp_size is {group.tp_size}", hint)
        heads = node.kv.kv_heads if node.kv is not None else group.tp_size
        if heads % group.tp_size and group.tp_size % heads:
            raise size.place.error(
                f"{key} is {group.tp_size} and does not divide {heads} KV heads of {name!r}",
                key,
                hint="choose a divisor or a multiple",
            )
        for what, count in node.parallel_sizes:
            if count % group.tp_size:
                raise size.place.error(
                    f"{key} is {group.tp_size} and does not divide {count} {what} of {name!r}",
                    key,
                    hint="choose a divisor",
                )


def _check_twice(spec: ModelSpec, groups: Sequence[NodeGroup], places: Mapping[str, Located]) -> None:
    uses = all_walks(spec)
    placed: dict[tuple[str, str | None], NodeGroup] = {}
    for group in groups:
        for node in group.node_names:
            mine = (
                [walk for walk, nodes in uses.items() if node in {n.name for n in nodes}]
                if group.graph_walks is None
                else list(group.graph_walks)
            )
            scope: list[str | None] = (
                [None] if group.graph_walks is None else [walk for walk in mine if node in {n.name for n in uses[walk]}]
            )
            for walk in scope:
                other = placed.get((node, walk))
                if other is not None:
                    where = f"in walk {walk!r}" if walk is not None else "for all walks"
                    index = group.node_names.index(node)
                    raise (
                        places[group.key]
                        .value[index]
                        .error(
                            f"node {node!r} is placed twice {where}",
                            f"{group.key}.node_names.{index}",
                            f"first by {other.key} ({places[other.key].source})",
                            "scope the groups with graph_walks, or list more ranks in one group",
                        )
                    )
                placed[node, walk] = group


def _check_gaps(groups: Sequence[NodeGroup], places: Mapping[str, Located]) -> None:
    used = {rank for group in groups for rank in group.ranks}
    for group in groups:
        for rank in group.ranks:
            if rank and rank - 1 not in used:
                raise places[group.key].error(
                    f"rank {rank} is used and rank {rank - 1} is not",
                    f"{group.key}.ranks",
                    hint="number the ranks from 0 without gaps",
                )


def check_coverage(spec: ModelSpec, groups: Sequence[NodeGroup], place: Located) -> None:
    """Every walk finds a place for each of its nodes; a node on a branch may follow its parent. Raises ConfigError."""
    for walk, nodes in all_walks(spec).items():
        for node in nodes:
            if not _is_placed(node, walk, groups):
                hint = f"add {node.owner.name} to a node group" + (
                    "" if not _is_named(node, groups) else f" whose graph_walks hold {walk}"
                )
                raise place.error(f"walk {walk!r} has no place for node {node.name!r}", "node_groups", hint=hint)


def _is_placed(node: NodeSpec, walk: str, groups: Sequence[NodeGroup]) -> bool:
    here = any(
        node.name in group.node_names and (group.graph_walks is None or walk in group.graph_walks) for group in groups
    )
    return here or node.of is not None and _is_placed(node.of, walk, groups)


def _is_named(node: NodeSpec, groups: Sequence[NodeGroup]) -> bool:
    return any(name in group.node_names for group in groups for name in (node.name, node.owner.name))


def make_plan(spec: ModelSpec, config: ResolvedConfig, devices: Sequence[str], of_plugin: Plan | None = None) -> Plan:
    """Return the placement on devices: entry i of `devices` for rank i, or ("cpu",) for plain processes.

    of_plugin: the placement by the model's plugin. Raises ConfigError for a rank that no device backs.
    """
    if of_plugin is not None:
        return with_budgets(spec, config, of_plugin)
    names = device_names(config, devices)
    placements = tuple(_placements(spec, config))
    ranks = tuple(
        RankPlan(
            rank=rank, device=device, nodes=_nodes_of(spec, rank, placements), follows=_followed(spec, rank, placements)
        )
        for rank, device in enumerate(names)
    )
    groups = _parallel_groups(placements)
    _check_groups(config, ranks, groups)
    return with_budgets(spec, config, Plan(ranks=ranks, placements=placements, groups=groups))


def device_names(config: ResolvedConfig, devices: Sequence[str]) -> tuple[str, ...]:
    """One device per rank. On the CPU a rank is a plain process, so one entry serves all of them."""
    if tuple(devices) == ("cpu",):
        return ("cpu",) * config.rank_count
    for group in config.node_groups:
        for rank in group.ranks:
            if rank >= len(devices):
                count = f"{len(devices)} {'device' if len(devices) == 1 else 'devices'}"
                choose = f"up with --fit or --gpus auto:{len(devices)}, which choose among the model's files"
                hint = f"give {config.rank_count} devices, or {choose}, or use a file with ranks below {len(devices)}"
                raise config.group_error(
                    group, "ranks", f"no device backs rank {rank}", f"{count} for {config.rank_count} ranks", hint
                )
    return tuple(devices[: config.rank_count])


def _placements(spec: ModelSpec, config: ResolvedConfig) -> list[NodePlacement]:
    order = {node.name: index for index, node in enumerate(spec.nodes)}
    placements = [
        NodePlacement(node=node, replicas=group.replicas, walks=group.graph_walks, tp_size=group.tp_size)
        for group in config.node_groups
        for node in group.node_names
    ]
    return sorted(placements, key=lambda placement: order[placement.node])


def _nodes_of(spec: ModelSpec, rank: int, placements: Sequence[NodePlacement]) -> tuple[str, ...]:
    """Return the nodes that a rank serves: alone, or as the leader of a group."""
    held = {p.node for p in placements if any(rank == replica[0] for replica in p.replicas)}
    return tuple(node.name for node in spec.nodes if node.name in held)


def _followed(spec: ModelSpec, rank: int, placements: Sequence[NodePlacement]) -> tuple[str, ...]:
    """Return the nodes of which a rank computes a share for the leader of its group."""
    held = {p.node for p in placements if any(rank in replica[1:] for replica in p.replicas)}
    return tuple(node.name for node in spec.nodes if node.name in held)


def _parallel_groups(placements: Sequence[NodePlacement]) -> tuple[GroupPlan, ...]:
    nodes: dict[tuple[int, ...], list[str]] = {}
    for placement in placements:
        for replica in placement.replicas:
            if len(replica) > 1 and placement.node not in nodes.setdefault(replica, []):
                nodes[replica].append(placement.node)
    return tuple(GroupPlan(ranks=ranks, nodes=tuple(names)) for ranks, names in sorted(nodes.items()))


def _check_groups(config: ResolvedConfig, ranks: Sequence[RankPlan], groups: Sequence[GroupPlan]) -> None:
    """Refuse a rank that is in two groups."""
    for rank in ranks:
        memberships = [group for group in groups if rank.rank in group.ranks]
        if len(memberships) > 1:
            raise _group_error(
                config,
                rank.rank,
                f"rank {rank.rank} is in two tensor-parallel groups",
                " and ".join(f"ranks {', '.join(map(str, group.ranks))}" for group in memberships),
                "give both the same ranks in the same order, or disjoint ones",
            )


def _group_error(config: ResolvedConfig, rank: int, title: str, detail: str, hint: str) -> ConfigError:
    group = next(group for group in reversed(config.node_groups) if rank in group.ranks)
    return config.group_error(group, "ranks", title, detail, hint)
