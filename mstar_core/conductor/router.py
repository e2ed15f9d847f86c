"""Choice of replicas for a request by load. Owned by the conductor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mstar_core.config.deployment import Plan
from mstar_core.errors import WorkerLost
from mstar_core.graph import NodeSpec, StreamingGraphEdge, Walk, graph_nodes, loops
from mstar_core.plugin.spec import ModelSpec, Partition

Replicas = tuple[tuple[int, ...], ...]
Place = tuple[str, str, Replicas]
"""(walk, node, its replicas there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """Ranks of a request's nodes. by_walk overrides by_node for walks with a placement of their own."""

    by_node: Mapping[str, int]
    by_walk: Mapping[str, Mapping[str, int]]

    def of(self, walk: str) -> dict[str, int]:
        """Return the leading rank of every node in `walk`."""
        return {**self.by_node, **self.by_walk.get(walk, {})}

    @property
    def ranks(self) -> frozenset[int]:
        scoped = (rank for homes in self.by_walk.values() for rank in homes.values())
        return frozenset((*self.by_node.values(), *scoped))


def stream_sources(walk: Walk) -> Iterator[tuple[str, str]]:
    """Yield (stream, node that feeds it) of a walk. Any node of a loop may feed the streams of its results."""
    for use in graph_nodes(walk):
        yield from ((edge.stream.name, use.spec.name) for edge in use.outputs if isinstance(edge, StreamingGraphEdge))
    for loop in loops(walk):
        for edge in loop.outputs:
            if isinstance(edge, StreamingGraphEdge):
                yield from ((edge.stream.name, use.spec.name) for use in graph_nodes(loop))


@dataclass(slots=True)
class Router:
    """Picks a replica for every node. Nodes with the same replicas get the same one, so that they share a rank.

    load: open requests per rank. ready: ranks that take work. lost: cause by rank that does not.
    """

    spec: ModelSpec
    plan: Plan
    load: Counter[int] = field(default_factory=Counter)
    ready: set[int] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)
    _known: dict[str, list[Place]] = field(default_factory=dict)

    def choose(self, partitions: Iterable[Partition]) -> Homes:
        """Return the homes of a request that starts `partitions`. Raises WorkerLost if a node has no ready replica."""
        chosen: dict[Replicas, int] = {}
        by_node: dict[str, int] = {}
        by_walk: dict[str, dict[str, int]] = {}
        for partition in partitions:
            for walk, node, replicas in self._places(partition):
                rank = self._home(replicas, chosen)
                if by_node.setdefault(node, rank) != rank:
                    by_walk.setdefault(walk, {})[node] = rank
        return Homes(by_node=by_node, by_walk=by_walk)

    def _places(self, partition: Partition) -> list[Place]:
        """Return the replicas of each use of a node. Cached, because neither walks nor the plan change."""
        known = self._known.get(partition.name)
        if known is None:
            uses = [(walk, use.spec) for walk, body in partition.walks.items() for use in graph_nodes(body)]
            known = self._known[partition.name] = [(walk, spec.name, self._replicas(spec, walk)) for walk, spec in uses]
        return known

    def _replicas(self, node: NodeSpec, walk: str) -> Replicas:
        found = self.plan.replicas(node.name, walk)
        if not found and node.of is not None:
            found = self.plan.replicas(node.of.name, walk)
        if not found:
            raise WorkerLost(f"node {node.name} has no place in walk {walk}", hint="check the config's node_groups")
        return found

    def _home(self, replicas: Replicas, chosen: dict[Replicas, int]) -> int:
        if replicas not in chosen:
            live = [replica[0] for replica in replicas if replica[0] in self.ready]  # a leader waits for its followers
            if not live:
                rank = replicas[0][0]
                cause = self.lost.get(rank, "it has not finished its start")
                raise WorkerLost(f"worker {rank} is not available", cause, "try again in a few seconds", rank=rank)
            chosen[replicas] = min(live, key=lambda rank: (self.load[rank], rank))
        return chosen[replicas]

    def split_streams(self, partitions: Iterable[Partition], homes: Homes) -> list[str]:
        """Return the streams that nodes on several ranks feed, one after the other."""
        ranks: dict[str, set[int]] = {}
        for partition in partitions:
            for walk, body in partition.walks.items():
                where = homes.of(walk)
                for stream, node in stream_sources(body):
                    ranks.setdefault(stream, set()).add(where[node])
        return sorted(stream for stream, found in ranks.items() if len(found) > 1)

    def opened(self, homes: Homes) -> None:
        """Count a request on its ranks."""
        self.load.update(homes.ranks)

    def closed(self, homes: Homes) -> None:
        """Uncount a request."""
        self.load.subtract(homes.ranks)
