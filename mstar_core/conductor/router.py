"""Choice of replicas for a request by load and cached prefixes. Owned by the conductor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mstar_core.conductor.prefixes import Prefixes, prefix_keys
from mstar_core.config.deployment import Plan
from mstar_core.errors import WorkerLost
from mstar_core.graph import NodeSpec, StreamingGraphEdge, Walk, graph_nodes, loops
from mstar_core.messages.requests import NewRequest
from mstar_core.plugin.spec import ModelSpec, Partition

SPARE: Final = 2
"""Open requests by which a replica with a cached prefix may exceed the least loaded one."""

Replicas = tuple[tuple[int, ...], ...]
Leaders = tuple[int, ...]
"""The first rank of each replica. A replica of several ranks is a tensor-parallel group."""

Place = tuple[str, str, Replicas]
"""(walk, node, its replicas there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """Ranks of a request's nodes. by_walk overrides by_node for walks with a placement of their own.

    reasons: why each choice among replicas fell as it did, in words; empty without a choice.
    """

    by_node: Mapping[str, int]
    by_walk: Mapping[str, Mapping[str, int]]
    reasons: tuple[str, ...] = ()

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
    """Picks a replica for every node. Nodes whose replicas have the same leaders get the same one, to share a rank.

    A replica that has read the beginning of the prompt is preferred while it has at most SPARE more requests than the
    least loaded one.

    load: open requests per rank. ready: ranks that take work. has_prefix_caches: whether the deployment caches
    prefixes.
    """

    spec: ModelSpec
    plan: Plan
    has_prefix_caches: bool = True
    load: Counter[int] = field(default_factory=Counter)
    ready: set[int] = field(default_factory=set)
    prefixes: Prefixes = field(default_factory=Prefixes)
    _known: dict[str, list[Place]] = field(default_factory=dict)
    _reads: frozenset[Leaders] | None = None

    def choose(self, partitions: Iterable[Partition], message: NewRequest | None = None) -> Homes:
        """Return the homes of a request that starts `partitions`. Raises WorkerLost if a node has no ready replica.

        message: the request, whose prompt decides among replicas of nodes with a cache.
        """
        keys = prefix_keys(message) if message is not None and self._leaders_that_read else []
        reasons: list[str] = []
        chosen: dict[Leaders, int] = {}
        by_node: dict[str, int] = {}
        by_walk: dict[str, dict[str, int]] = {}
        for partition in partitions:
            for walk, node, replicas in self._places(partition):
                rank = self._home(replicas, chosen, keys, reasons)
                if by_node.setdefault(node, rank) != rank:
                    by_walk.setdefault(walk, {})[node] = rank
        return Homes(by_node=by_node, by_walk=by_walk, reasons=tuple(reasons))

    @property
    def _leaders_that_read(self) -> frozenset[Leaders]:
        """Leaders of the replicas, of several, of nodes with a prefix cache."""
        if self._reads is None:
            cached = {node.name for node in self.spec.nodes if node.kv is not None and self.has_prefix_caches}
            placements = [each for each in self.plan.placements if each.node in cached and len(each.replicas) > 1]
            self._reads = frozenset(_leaders(each.replicas) for each in placements)
        return self._reads

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

    def _home(self, replicas: Replicas, chosen: dict[Leaders, int], keys: Sequence[bytes], reasons: list[str]) -> int:
        leaders = _leaders(replicas)
        if leaders not in chosen:
            # The leader of a tensor-parallel group is ready once its followers are.
            live = [leader for leader in leaders if leader in self.ready]
            if not live:
                raise WorkerLost("no worker is available for this request", hint="try again in a few seconds")
            reads = leaders in self._leaders_that_read
            chosen[leaders], reason = self._best(live, keys if reads else ())
            if len(leaders) > 1:
                reasons.append(reason)
            if reads:
                self.prefixes.read(chosen[leaders], keys)
        return chosen[leaders]

    def _best(self, live: Sequence[int], keys: Sequence[bytes]) -> tuple[int, str]:
        """Return the replica for a prompt, and why."""
        least = min(live, key=lambda rank: (self.load[rank], rank))
        loads = f"{self.load[least]} open" + ("" if len(live) > 1 else ", no other replica is ready")
        if not keys or len(live) == 1:
            return least, f"rank {least}: least loaded ({loads})"
        found = {rank: self.prefixes.match(rank, keys) for rank in live}
        able = [rank for rank in live if self.load[rank] <= self.load[least] + SPARE]
        best = max(able, key=lambda rank: (found[rank], -self.load[rank], -rank))
        if found[best]:
            part = f"has read {found[best]} of {len(keys)} blocks of the prompt"
            return best, f"rank {best}: {part}, {self.load[best]} open, at least {self.load[least]} elsewhere"
        owner = max(live, key=lambda rank: found[rank])
        but = f"; rank {owner} has read the prompt, but {self.load[owner]} are open there" if found[owner] else ""
        return least, f"rank {least}: least loaded ({loads}){but}"

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


def _leaders(replicas: Replicas) -> Leaders:
    return tuple(replica[0] for replica in replicas)
