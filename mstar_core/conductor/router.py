"""Choice of replicas for a request by load, cached prefixes and hosts. Owned by the conductor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from mstar_core.conductor.prefixes import Block, Prefixes, prefix_blocks
from mstar_core.conductor.sessions import SessionRanks
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


class Options(NamedTuple):
    """Replicas to choose from. best: those that cost a request least. read: ids of its prompt that each has read.

    prompt_ids: of which that many are known here; 0 if the prompt does not count. is_kept: whether the one in `best`
    serves the session of the request.
    """

    best: tuple[int, ...]
    read: Mapping[int, int]
    prompt_ids: int
    is_kept: bool = False


class Hosts(NamedTuple):
    """Hosts for one request, in the order in which it prefers them: first the one that most of its nodes may be on.

    by_rank: names; the supervisor's host has none. order: place of each host; empty if hosts do not matter.
    """

    by_rank: Mapping[int, str]
    order: Mapping[str, int]

    @classmethod
    def of(cls, plan: Plan, options: Collection[Options]) -> Hosts:
        """Return the hosts of a plan for one request. options: for all its nodes."""
        by_rank = {each.rank: each.host for each in plan.ranks if each.host}
        if len(options) < 2 or not by_rank:
            return cls(by_rank, {})
        count: Counter[str] = Counter()
        for option in options:
            count.update({by_rank.get(rank, "") for rank in option.best})
        most = sorted(count, key=lambda host: (-count[host], host))
        return cls(by_rank, {host: number for number, host in enumerate(most)})

    def preferred(self, ranks: Iterable[int]) -> int:
        """Return the rank to choose among equally good ones."""
        return min(ranks, key=lambda rank: (self._number(rank), rank))

    def reason(self, rank: int, best: Iterable[int]) -> str:
        """Return the part of the hosts in the choice of a rank; empty if they did not matter."""
        if len({self._number(other) for other in best}) == 1:
            return ""
        host = self.by_rank.get(rank, "")
        return f", on {f'host {host}' if host else 'the host of the supervisor'} like most of its nodes"

    def _number(self, rank: int) -> int:
        return self.order.get(self.by_rank.get(rank, ""), 0)


@dataclass(slots=True)
class Router:
    """Picks a replica for every node. Nodes whose replicas have the same leaders get the same one, to share a rank.

    Each replica is weighed by its open requests, less the saved prefill of what it has read of the prompt: one request
    for IDS_PER_REQUEST ids, SPARE requests at most. A short prefix decides between equally loaded replicas only.
    Replicas that are still equal then keep the nodes of a request on one host, see `Hosts`. A request of a session goes
    to the replicas that served the session, however loaded, while they are ready and not cordoned.

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
    sessions: SessionRanks = field(default_factory=SessionRanks)
    _known: dict[str, list[Place]] = field(default_factory=dict)
    _reads: frozenset[Leaders] | None = None

    def choose(self, partitions: Iterable[Partition], message: NewRequest | None = None) -> Homes:
        """Return the homes of a request that starts `partitions`. Raises WorkerLost if a node has no ready replica.

        message: the request, whose prompt decides among replicas of nodes with a cache.
        """
        blocks = prefix_blocks(message) if message is not None and self._leaders_that_read else []
        is_resumed = message is not None and message.resume is not None
        session = message.session if message is not None else ""
        served = self.sessions.of(session)
        places = [place for partition in partitions for place in self._places(partition)]
        kept = {_leaders(replicas): served[walk, node] for walk, node, replicas in places if (walk, node) in served}
        options = {
            leaders: self._options(leaders, blocks, kept.get(leaders), is_resumed=is_resumed)
            for leaders in dict.fromkeys(_leaders(replicas) for _, _, replicas in places)
        }
        hosts = Hosts.of(self.plan, options.values())
        chosen = {leaders: hosts.preferred(option.best) for leaders, option in options.items()}
        by_node: dict[str, int] = {}
        by_walk: dict[str, dict[str, int]] = {}
        for walk, node, replicas in places:
            rank = chosen[_leaders(replicas)]
            if by_node.setdefault(node, rank) != rank:
                by_walk.setdefault(walk, {})[node] = rank
        for leaders, rank in chosen.items():
            if leaders in self._leaders_that_read:
                self.prefixes.read(rank, blocks)
        reasons = tuple(
            self._reason(chosen[leaders], option, hosts) for leaders, option in options.items() if len(leaders) > 1
        )
        self.sessions.served(session, {(walk, node): chosen[_leaders(replicas)] for walk, node, replicas in places})
        return Homes(by_node=by_node, by_walk=by_walk, reasons=reasons)

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

    def _options(self, leaders: Leaders, blocks: Sequence[Block], kept: int | None, *, is_resumed: bool) -> Options:
        """Return what there is to choose among replicas. Raises WorkerLost if none is ready.

        kept: rank that serves the session of the request, None without one.
        """
        # The leader of a tensor-parallel group is ready once its followers are.
        ready = [leader for leader in leaders if leader in self.ready]
        live = [leader for leader in ready if leader not in self.cordoned] or ([] if is_resumed else ready)
        if not live:
            raise WorkerLost("no worker is available for this request", hint="try again in a few seconds")
        if len(live) == 1 or leaders not in self._leaders_that_read:
            blocks = ()
        read = {rank: self.prefixes.match(rank, blocks) for rank in live} if blocks else dict.fromkeys(live, 0)
        cost = {rank: self.load[rank] - min(SPARE, read[rank] / IDS_PER_REQUEST) for rank in live}
        own = tuple(rank for rank in live if rank == kept)
        least = min(cost.values())
        return Options(
            best=own or tuple(rank for rank in live if cost[rank] == least),
            read=read,
            prompt_ids=sum(block.ids for block in blocks),
            is_kept=bool(own),
        )

    def _reason(self, rank: int, option: Options, hosts: Hosts) -> str:
        """Return why a request goes to a replica."""
        read, place = option.read, hosts.reason(rank, option.best)
        if option.is_kept:
            return f"rank {rank}: serves the session of the request ({self.load[rank]} open)"
        if len(read) == 1:
            return f"rank {rank}: least loaded ({self.load[rank]} open, no other replica is ready)"
        if read[rank]:
            part = f"has read {read[rank]} of {option.prompt_ids} ids of the prompt"
            others = min(self.load[other] for other in read if other != rank)
            return f"rank {rank}: {part}, {self.load[rank]} open, at least {others} elsewhere{place}"
        owner = max(read, key=lambda other: read[other])
        but = f"; rank {owner} has read {read[owner]} ids, but {self.load[owner]} are open there" if read[owner] else ""
        return f"rank {rank}: least loaded ({self.load[rank]} open){place}{but}"

    def split_streams(self, partitions: Iterable[Partition], homes: Homes) -> list[str]:
        """Return the streams that nodes on several ranks feed, one after the other."""
        ranks: dict[str, set[int]] = {}
        for partition in partitions:
            for walk, body in partition.walks.items():
                where = homes.of(walk)
                for stream, node in stream_sources(body):
                    ranks.setdefault(stream, set()).add(where[node])
        return sorted(stream for stream, sources in ranks.items() if len(sources) > 1)

    def uses_other_hosts(self, ranks: Collection[int]) -> bool:
        """Return whether one of these ranks is on another host than the conductor."""
        return any(each.host for each in self.plan.ranks if each.rank in ranks)

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
