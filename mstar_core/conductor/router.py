"""Chooses replicas for a request by load. Owned by the conductor; knows ranks, not messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mstar_core.config.deployment import Plan
from mstar_core.errors import WorkerLost
from mstar_core.graph import graph_nodes
from mstar_core.plugin.spec import ModelSpec, Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """Where a request's nodes run. by_walk overrides by_node for walks with a placement of their own."""

    by_node: Mapping[str, int]
    by_walk: Mapping[str, Mapping[str, int]]

    def of(self, walk: str) -> dict[str, int]:
        """Leading rank of every node in `walk`."""
        return {**self.by_node, **self.by_walk.get(walk, {})}

    @property
    def ranks(self) -> frozenset[int]:
        scoped = (rank for homes in self.by_walk.values() for rank in homes.values())
        return frozenset((*self.by_node.values(), *scoped))


@dataclass(slots=True)
class Router:
    """Picks a replica for every node; nodes with the same replicas go to the same one, so that they meet on a rank.

    load: open requests per rank. ready: ranks that may be given work; lost: why the others may not.
    """

    spec: ModelSpec
    plan: Plan
    load: Counter[int] = field(default_factory=Counter)
    ready: set[int] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)

    def choose(self, partitions: Iterable[Partition]) -> Homes:
        """Homes for a request that starts `partitions`. Raises WorkerLost when a node has no ready replica."""
        chosen: dict[tuple[tuple[int, ...], ...], int] = {}
        by_node: dict[str, int] = {}
        by_walk: dict[str, dict[str, int]] = {}
        for partition in partitions:
            for walk_name, walk in partition.walks.items():
                for use in graph_nodes(walk):
                    rank = self._home(use.spec.name, walk_name, chosen)
                    if rank is None and use.spec.of is not None:
                        rank = self._home(use.spec.of.name, walk_name, chosen)
                    if rank is None:
                        raise WorkerLost(
                            f"node {use.spec.name} has no place in walk {walk_name}",
                            hint="check the config's node_groups",
                        )
                    if by_node.setdefault(use.spec.name, rank) != rank:
                        by_walk.setdefault(walk_name, {})[use.spec.name] = rank
        return Homes(by_node=by_node, by_walk=by_walk)

    def _home(self, node: str, walk: str, chosen: dict[tuple[tuple[int, ...], ...], int]) -> int | None:
        replicas = self.plan.replicas(node, walk)
        if not replicas:
            return None
        if replicas not in chosen:
            live = [replica[0] for replica in replicas if self.ready.issuperset(replica)]
            if not live:
                rank = replicas[0][0]
                cause = self.lost.get(rank, "it has not finished its start")
                raise WorkerLost(f"worker {rank} is not available", cause, "try again in a few seconds", rank=rank)
            chosen[replicas] = min(live, key=lambda rank: (self.load[rank], rank))
        return chosen[replicas]

    def opened(self, homes: Homes) -> None:
        """Count a request on its ranks."""
        self.load.update(homes.ranks)

    def closed(self, homes: Homes) -> None:
        """Uncount a request."""
        self.load.subtract(homes.ranks)
