"""Ranks of a request's caches, and the moves that its runs require. Owned by the conductor's record of the request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from mstar_core.graph import KV_CACHE, MAIN, NodeSpec, Walk, graph_nodes
from mstar_core.messages.work import Move, RunWalk, SignalRef

Cache = tuple[str, str]
"""(node that owns the cache, branch)."""


class CacheUse(NamedTuple):
    """Use of a cache by a node of a walk. node: as placed. owner: the node whose cache it uses.

    branches: those that it can run on.
    """

    node: str
    owner: str
    branches: frozenset[str]


def cache_uses(walk: Walk) -> tuple[CacheUse, ...]:
    """Return the caches that a walk uses. A branch with a node of its own in the walk is used by that node only."""
    specs = {use.spec.name: use.spec for use in graph_nodes(walk) if use.spec.engine is KV_CACHE}
    apart = {spec.branch for spec in specs.values() if spec.of is not None}
    return tuple(
        CacheUse(
            spec.name,
            spec.owner.name,
            frozenset((spec.branch,)) if spec.of is not None else frozenset(_branches(spec)) - apart,
        )
        for spec in specs.values()
    )


def _branches(node: NodeSpec) -> tuple[str, ...]:
    return (MAIN,) if node.kv is None else node.kv.branches


@dataclass(slots=True)
class CachePlaces:
    """Rank of each cache of one request, after all runs that were handed out. A cache without an entry is empty."""

    ranks: dict[Cache, int] = field(default_factory=dict)

    def shares(
        self,
        message: RunWalk,
        uses: Iterable[CacheUse],
        homes: Mapping[str, int],
        ranks: Iterable[int],
        owners: Mapping[str, Sequence[str]],
    ) -> dict[int, RunWalk]:
        """Return the run's message for every rank that takes part in it, and note where the caches are after it.

        uses: of the walk. homes: rank by node. ranks: of the walk's nodes. owners: branches by node with a cache.
        """
        gives: dict[int, list[Move]] = {}
        takes: dict[int, list[Move]] = {}
        members = [*dict.fromkeys(ranks), *self._fork(message.forks, owners), *_holders(message)]
        for use in uses:
            home = homes[use.node]
            for branch in [name for name in message.branches or (MAIN,) if name in use.branches]:
                source = self.ranks.get((use.owner, branch), home)
                self.ranks[use.owner, branch] = home
                if source != home:
                    gives.setdefault(source, []).append(Move(use.owner, branch, home))
                    takes.setdefault(home, []).append(Move(use.owner, branch, source))
                    members.append(source)
        if not gives:
            return dict.fromkeys(members, message)
        return {
            rank: msgspec.structs.replace(message, gives=gives.get(rank, []), takes=takes.get(rank, []))
            for rank in dict.fromkeys(members)
        }

    def _fork(self, forks: Iterable[tuple[str, str]], owners: Mapping[str, Sequence[str]]) -> Iterator[int]:
        """Note the forks of a run. Yields the ranks that carry them out: of the source, and of what it replaces."""
        for source, into in forks:
            for owner, branches in owners.items():
                if into not in branches or (source and source not in branches):
                    continue
                replaced = self.ranks.pop((owner, into), None)
                if replaced is not None:
                    yield replaced
                rank = self.ranks.get((owner, source))
                if rank is not None:
                    self.ranks[owner, into] = rank
                    yield rank


def _holders(message: RunWalk) -> Iterator[int]:
    """Yield the ranks that hold inputs of a run which earlier walks kept."""
    return (ref.rank for ref in message.inputs.values() if isinstance(ref, SignalRef))
