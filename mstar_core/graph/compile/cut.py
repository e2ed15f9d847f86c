"""Placement of a compiled walk: the share of each rank, the values that cross ranks and the leader of each loop.

Used by workers. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from mstar_core.errors import GraphError
from mstar_core.graph.compile.compiled import ROOT, CompiledLoop, CompiledTask, CompiledWalk, Kind, Source

LOCAL_KINDS: Final = (Kind.TASK, Kind.LOOP, Kind.VAR, Kind.IMPORT, Kind.CHUNK)
"""Kinds of values that come into being while the walk runs."""


class Use(NamedTuple):
    """A consumer on one rank. what: `task` (index, number of its input), `import` (loop, number), `start` (loop,
    number of the variable), `back` (loop, number of the variable), `last` (loop, number of the result)."""

    what: str
    at: int
    number: int


@dataclass(slots=True)
class Fanout:
    """Consumers of one source on one rank, and the other ranks that get a copy of its value."""

    uses: list[Use] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWalk:
    """One rank's share of a walk. Immutable in use; shared by all requests with the same placement.

    tasks: indices that run here. loops: loops with a task here. leaders: leading rank of every loop (it decides
    whether an iteration follows). followers: other ranks in each loop. judges: rank of each loop's stop port.
    owners: rank of each carried port and result, by (loop, port). fanouts: consumers by source.
    """

    rank: int
    walk: CompiledWalk
    tasks: frozenset[int]
    loops: frozenset[int]
    leaders: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]
    judges: tuple[int, ...]
    owners: Mapping[tuple[int, str], int]
    fanouts: Mapping[Source, Fanout]
    frame_tasks: Mapping[int, tuple[int, ...]]
    frame_loops: Mapping[int, tuple[int, ...]]

    def leads(self, loop: int) -> bool:
        """Whether this rank decides about the iterations of a loop."""
        return self.leaders[loop] == self.rank


def cut(walk: CompiledWalk, home: Mapping[int | str, int]) -> dict[int, RankWalk]:
    """Return each rank's share. home: task index or node name -> rank; `on_branch` nodes default to their parent's.

    Raises GraphError for a node without a place.
    """
    ranks = [_home(task, walk, home) for task in walk.tasks]
    plan = _Cut(walk, ranks)
    return {rank: plan.share(rank) for rank in sorted(set(ranks))}


def _home(task: CompiledTask, walk: CompiledWalk, home: Mapping[int | str, int]) -> int:
    spec = task.node.spec
    keys: list[int | str] = [task.index, spec.name]
    while spec.of is not None:
        spec = spec.of
        keys.append(spec.name)
    for key in keys:
        if key in home:
            return home[key]
    raise GraphError(
        f"walk {walk.name!r} has no rank for node {task.name!r}", hint="place it in a node group", place=task.name
    )


class _Cut:
    """Working state of `cut`."""

    def __init__(self, walk: CompiledWalk, ranks: list[int]) -> None:
        self.walk = walk
        self.ranks = ranks
        self.members = [sorted({ranks[t] for t in walk.tasks_within(loop.index)}) for loop in walk.loops]
        self.owners: dict[tuple[int, str], int] = {}
        for loop in reversed(walk.loops):
            for variable in loop.variables:
                self.owners[loop.index, variable.port] = self.rank_of(variable.back)
            for result in loop.results:
                self.owners[loop.index, "=" + result.port] = self.rank_of(result.back)
        self.leaders = [self.leader(loop) for loop in walk.loops]
        self.uses: dict[Source, dict[int, list[Use]]] = {}
        self.find_uses()

    def rank_of(self, source: Source) -> int:
        """Return the rank that produces a value of the loop's own body."""
        if source.kind is Kind.TASK:
            return self.ranks[source.at]
        return self.owners[source.at, "=" + source.port]

    def leader(self, loop: CompiledLoop) -> int:
        if loop.tap is not None:
            return self.ranks[loop.tap]
        if loop.stop_task is not None:
            return self.ranks[loop.stop_task]
        if loop.variables:
            return self.owners[loop.index, loop.variables[0].port]
        return self.ranks[self.walk.tasks_within(loop.index)[0]]

    def origin(self, source: Source) -> int | None:
        """Return the rank that produces a value; None for imports, which exist on every rank that uses them."""
        match source.kind:
            case Kind.TASK:
                return self.ranks[source.at]
            case Kind.LOOP:
                return self.owners[source.at, "=" + source.port]
            case Kind.VAR:
                return self.owners[source.at, source.port]
            case Kind.CHUNK:
                tasks = len(self.walk.tasks)
                return self.ranks[source.at] if source.at < tasks else self.leaders[source.at - tasks]
            case _:
                return None

    def use(self, source: Source, rank: int, use: Use) -> None:
        if source.kind in LOCAL_KINDS:
            self.uses.setdefault(source, {}).setdefault(rank, []).append(use)

    def find_uses(self) -> None:
        """Collect the consumers of every source, by rank."""
        for task in self.walk.tasks:
            for number, entry in enumerate(task.inputs):
                self.use(entry.source, self.ranks[task.index], Use("task", task.index, number))
        for loop in reversed(self.walk.loops):  # inner loops first: their imports are consumers in the outer frame
            for number, variable in enumerate(loop.variables):
                owner = self.owners[loop.index, variable.port]
                self.use(variable.start, owner, Use("start", loop.index, number))
                self.use(variable.back, owner, Use("back", loop.index, number))
            for number, result in enumerate(loop.results):
                if result.variable is None:
                    self.use(result.back, self.owners[loop.index, "=" + result.port], Use("last", loop.index, number))
            for number, source in enumerate(loop.imports):
                inside = Source(Kind.IMPORT, loop.index, str(number))
                for rank in sorted(self.uses.get(inside, {})):
                    self.use(source, rank, Use("import", loop.index, number))

    def share(self, rank: int) -> RankWalk:
        tasks = frozenset(i for i, home in enumerate(self.ranks) if home == rank)
        loops = frozenset(i for i, members in enumerate(self.members) if rank in members)
        frames = [ROOT, *sorted(loops)]
        return RankWalk(
            rank=rank,
            walk=self.walk,
            tasks=tasks,
            loops=loops,
            leaders=tuple(self.leaders),
            followers=tuple(
                tuple(member for member in members if member != leader)
                for members, leader in zip(self.members, self.leaders, strict=True)
            ),
            judges=tuple(
                self.leaders[loop.index] if loop.stop_task is None else self.ranks[loop.stop_task]
                for loop in self.walk.loops
            ),
            owners=self.owners,
            fanouts=self.fanouts(rank),
            frame_tasks={f: tuple(t for t in self.walk.frame_tasks(f) if t in tasks) for f in frames},
            frame_loops={f: tuple(n for n in self.walk.frame_loops(f) if n in loops) for f in frames},
        )

    def fanouts(self, rank: int) -> dict[Source, Fanout]:
        fanouts: dict[Source, Fanout] = {}
        for source, by_rank in self.uses.items():
            others = sorted(other for other in by_rank if other != rank) if self.origin(source) == rank else []
            if rank in by_rank or others:
                fanouts[source] = Fanout(by_rank.get(rank, []), others)
        return fanouts
