"""Refusals of placements whose state this version cannot move between ranks. Called by the planner of `up`.

A KV cache moves with its request between the ranks of its node's walks. Everything else that outlives a walk stays.
"""

from __future__ import annotations

from collections.abc import Iterator

from mstar_core.config.deployment import Plan
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.graph import NodeSpec, StreamingGraphEdge, graph_nodes, loops
from mstar_core.plugin import ModelSpec

Replicas = tuple[tuple[int, ...], ...]


def check_moves(model: ModelSpec, config: ResolvedConfig, plan: Plan) -> None:
    """Raise ConfigError for a node whose walks are on different ranks and that has state that cannot move."""
    for node in model.nodes:
        if node.of is not None:
            continue
        places = dict(_places(model, node, plan))
        if len(set(places.values())) < 2:
            continue
        why = _obstacle(model, node, plan)
        if why:
            where = "; ".join(f"{walk} on {_ranks(replicas)}" for walk, replicas in places.items())
            group = next(group for group in reversed(config.node_groups) if node.name in group.node_names)
            raise config.group_error(
                group,
                "ranks",
                f"node {node.name!r} is placed on different ranks, but {why}",
                where,
                "place all walks of the node on the same ranks",
            )


def _places(model: ModelSpec, node: NodeSpec, plan: Plan) -> Iterator[tuple[str, Replicas]]:
    """Yield (walk, replicas) of each use of a node or one of its cache branches."""
    for partition in model.partitions:
        for name, walk in partition.walks.items():
            for use in graph_nodes(walk):
                if use.spec.owner == node:
                    ranks = plan.replicas(use.spec.name, name) or plan.replicas(node.name, name)
                    yield (name if use.spec == node else f"{name} ({use.spec.name})"), ranks


def _obstacle(model: ModelSpec, node: NodeSpec, plan: Plan) -> str:
    """Return why the walks of a node must share their ranks; empty if they need not."""
    branches = {other.name for other in model.nodes if other.owner == node}
    if node.kv is None:
        return _stateless_obstacle(model, node)
    if any(placement.tp_size > 1 for placement in plan.placements if placement.node in branches):
        return "caches of tensor-parallel groups do not move in this version"
    using = [
        partition.name
        for partition in model.partitions
        if any(use.spec.owner == node for walk in partition.walks.values() for use in graph_nodes(walk))
    ]
    if len(using) > 1:
        return f"partitions {' and '.join(using)} run it side by side, so its cache has no single order of moves"
    return ""


def _stateless_obstacle(model: ModelSpec, node: NodeSpec) -> str:
    walks = [walk for partition in model.partitions for walk in partition.walks.values()]
    uses = [use for walk in walks for use in graph_nodes(walk) if use.spec == node]
    if any(isinstance(edge, StreamingGraphEdge) for use in uses for edge in use.outputs):
        return "it feeds a stream, whose items must come from one rank"
    carried = {port for walk in walks for loop in loops(walk) for port in loop.carry}
    kept = sorted(carried & node.ports.keys())
    if kept:
        return f"a later walk may go on from its last {kept[0]!r}, which stays on its rank"
    return ""


def _ranks(replicas: Replicas) -> str:
    ranks = [str(rank) for replica in replicas for rank in replica]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
