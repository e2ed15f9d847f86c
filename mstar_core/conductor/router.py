"""Choice of replicas for a request by load and cached prefixes. Owned by the conductor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mstar_core.conductor.prefixes import Block, Prefixes, prefix_blocks
from mstar_core.config.deployment import Plan
from mstar_core.errors import EngineError, WorkerLost
from mstar_core.graph import NodeSpec, StreamingGraphEdge, Walk, graph_nodes, loops
from mstar_core.messages.requests import NewRequest
from mstar_core.plugin.spec import ModelSpec, Partition

SPARE: Final = 2
"""Open requests by which a replica with a cached prefix may at most exceed the least loaded one."""

IDS_PER_REQUEST: Final = 512
"""Ids of a cached prefix that outweigh one open request. A short prefix is read again in less than that costs."""

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

    Each replica is weighed by its open requests, less the saved prefill of what it has read of the prompt: one request
    for IDS_PER_REQUEST ids, SPARE requests at most. A short prefix decides between equally loaded replicas only.

    load: open requests per rank. ready: ranks that take work. cordoned: ranks that are chosen only if no other replica
    is ready, and never for a resumed request, which waits instead: it may come from there. has_prefix_caches: whether
    the deployment caches prefixes.
    """

    spec: ModelSpec
    plan: Plan
    has_prefix_caches: bool = True
    load: Counter[int] = field(default_factory=Counter)
    ready: set[int] = field(default_factory=set)
    cordoned: frozenset[int] = frozenset()
    prefixes: Prefixes = field(default_factory=Prefixes)
    _known: dict[str, list[Place]] = field(default_factory=dict)
    _reads: frozenset[Leaders] | None = None

    def choose(self, partitions: Iterable[Partition], message: NewRequest | None = None) -> Homes:
        """Return the homes of a request that starts `partitions`. Raises WorkerLost if a node has no ready replica.

        message: the request, whose prompt decides among replicas of nodes with a cache.
        """
        blocks = prefix_blocks(message) if message is not None and self._leaders_that_read else []
        is_resumed = message is not None and message.resume is not None
        reasons: list[str] = []
        chosen: dict[Leaders, int] = {}
        by_node: dict[str, int] = {}
        by_walk: dict[str, dict[str, int]] = {}
        for partition in partitions:
            for walk, node, replicas in self._places(partition):
                rank = self._home(replicas, chosen, blocks, reasons, is_resumed=is_resumed)
                if by_node.setdefault(node, rank) != rank:
                    by_walk.setdefault(walk, {})[node] = rank
        return Homes(by_node=by_node, by_walk=by_walk, reasons=tuple(reasons))

    @property
    def _leaders_that_read(self) -> frozenset[Leaders]:
        """Leaders of the replicas, of several, of nodes with a prefix cache."""
        if self._reads is None:
            cached = {node.name for node in self.spec.nodes if node.kv is not None and self.has_prefix_caches}
            choices = [place.replicas for place in self.plan.placements if place.node in cached]
            self._reads = frozenset(_leaders(replicas) for replicas in choices if len(replicas) > 1)
        return self._reads

    def _places(self, partition: Partition) -> list[Place]:
        """Return the replicas of each use of a node. Cached, because neither walks nor the plan change."""
        known = self._known.get(partition.name)
        if known is None:
            uses = [(walk, use.spec) for walk, body in partition.walks.items() for use in graph_nodes(body)]
            known = self._known[partition.name] = [(walk, spec.name, self._replicas(spec, walk)) for walk, spec in uses]
        return known

    def _replicas(self, node: NodeSpec, walk: str) -> Replicas:
        replicas = self.plan.replicas(node.name, walk)
        if not replicas and node.of is not None:
            replicas = self.plan.replicas(node.of.name, walk)
        if not replicas:
            raise EngineError(f"node {node.name} has no place in walk {walk}", hint="check the config's node_groups")
        return replicas

    def _home(
        self,
        replicas: Replicas,
        chosen: dict[Leaders, int],
        blocks: Sequence[Block],
        reasons: list[str],
        *,
        is_resumed: bool,
    ) -> int:
        leaders = _leaders(replicas)
        if leaders not in chosen:
            # The leader of a tensor-parallel group is ready once its followers are.
            ready = [leader for leader in leaders if leader in self.ready]
            live = [leader for leader in ready if leader not in self.cordoned] or ([] if is_resumed else ready)
            if not live:
                raise WorkerLost("no worker is available for this request", hint="try again in a few seconds")
            reads = leaders in self._leaders_that_read
            chosen[leaders], reason = self._best(live, blocks if reads else ())
            if len(leaders) > 1:
                reasons.append(reason)
            if reads:
                self.prefixes.read(chosen[leaders], blocks)
        return chosen[leaders]

    def _best(self, live: Sequence[int], blocks: Sequence[Block]) -> tuple[int, str]:
        """Return the replica for a prompt, and why."""
        least = min(live, key=lambda rank: (self.load[rank], rank))
        loads = f"{self.load[least]} open" + ("" if len(live) > 1 else ", no other replica is ready")
        if not blocks or len(live) == 1:
            return least, f"rank {least}: least loaded ({loads})"
        read = {rank: self.prefixes.match(rank, blocks) for rank in live}
        cost = {rank: self.load[rank] - min(SPARE, read[rank] / IDS_PER_REQUEST) for rank in live}
        best = min(live, key=lambda rank: (cost[rank], rank))
        if read[best]:
            part = f"has read {read[best]} of {sum(block.ids for block in blocks)} ids of the prompt"
            others = min(self.load[rank] for rank in live if rank != best)
            return best, f"rank {best}: {part}, {self.load[best]} open, at least {others} elsewhere"
        owner = max(live, key=lambda rank: read[rank])
        but = f"; rank {owner} has read {read[owner]} ids, but {self.load[owner]} are open there" if read[owner] else ""
        return best, f"rank {best}: least loaded ({self.load[best]} open){but}"

    def split_streams(self, partitions: Iterable[Partition], homes: Homes) -> list[str]:
        """Return the streams that nodes on several ranks feed, one after the other."""
        ranks: dict[str, set[int]] = {}
        for partition in partitions:
            for walk, body in partition.walks.items():
                where = homes.of(walk)
                for stream, node in stream_sources(body):
                    ranks.setdefault(stream, set()).add(where[node])
        return sorted(stream for stream, sources in ranks.items() if len(sources) > 1)

    def replan(self, plan: Plan) -> None:
        """Take another placement. Requests keep the replicas that were chosen for them."""
        self.plan, self._reads = plan, None
        self._known.clear()

    @property
    def idle_cordons(self) -> list[int]:
        """Cordoned ranks without an open request."""
        return sorted(rank for rank in self.cordoned if not self.load[rank])

    def opened(self, homes: Homes) -> None:
        """Count a request on its ranks."""
        self.load.update(homes.ranks)

    def closed(self, homes: Homes) -> None:
        """Uncount a request."""
        self.load.subtract(homes.ranks)


def _leaders(replicas: Replicas) -> Leaders:
    return tuple(replica[0] for replica in replicas)
