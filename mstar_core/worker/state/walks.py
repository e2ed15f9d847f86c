"""Compiled walks of the served model and their cuts by placement, shared by all requests of a rank."""

from __future__ import annotations

from collections.abc import Mapping

from mstar_core.graph.compile.compiled import CompiledWalk, Kind
from mstar_core.graph.compile.cut import RankWalk, cut
from mstar_core.graph.compile.resident import LoopPorts, resident_ports
from mstar_core.graph.compile.wiring import compile_graph
from mstar_core.plugin.spec import ModelSpec


def resident_loops(spec: ModelSpec) -> dict[str, LoopPorts]:
    """Return the ports per sequence of the resident loop of each node that has one with more than its id."""
    walks = {name: walk for partition in spec.partitions for name, walk in partition.walks.items()}
    return resident_ports(compile_graph(walks, spec.streams).values())


class RankWalks:
    """Compiled walks and their cuts by placement. Owned by the executor."""

    def __init__(self, spec: ModelSpec, rank: int) -> None:
        self._rank = rank
        walks = {name: walk for partition in spec.partitions for name, walk in partition.walks.items()}
        self._compiled: dict[str, CompiledWalk] = compile_graph(walks, spec.streams)
        self._aliases = dict(spec.walk_aliases)
        self._cuts: dict[tuple[str, tuple[tuple[str, int], ...]], Mapping[int, RankWalk]] = {}
        self._loop_keepers: dict[int, bool] = {}
        self._carried: dict[str, frozenset[str]] = {}

    def share(self, walk: str, homes: Mapping[str, int]) -> RankWalk | None:
        """Return this rank's share of a walk under a placement of its nodes; None if it has none of them."""
        return self.shares(walk, homes).get(self._rank)

    def shares(self, walk: str, homes: Mapping[str, int]) -> Mapping[int, RankWalk]:
        """Return the share of every rank."""
        compiled = self._compiled[self._aliases.get(walk, walk)]
        nodes = {task.name for task in compiled.tasks}
        placed = tuple(sorted((node, rank) for node, rank in homes.items() if node in nodes))
        key = (compiled.name, placed)
        if key not in self._cuts:
            self._cuts[key] = cut(compiled, {**dict(placed)})
        return self._cuts[key]

    def carried(self, node: str) -> frozenset[str]:
        """Return the output ports of a node that a later run may start from."""
        if node not in self._carried:
            self._carried[node] = frozenset(
                variable.held[1]
                for walk in self._compiled.values()
                for loop in walk.loops
                for variable in loop.variables
                if variable.held[0] == node
            )
        return self._carried[node]

    def keeps_for_loops(self, share: RankWalk) -> bool:
        """Whether a task of a share keeps cached tokens only as long as its loop runs."""
        if id(share) not in self._loop_keepers:
            uses = (share.walk.tasks[index].node.attend for index in share.tasks)
            self._loop_keepers[id(share)] = any(attend is not None and attend.keep == "loop" for attend in uses)
        return self._loop_keepers[id(share)]


def run_inputs(share: RankWalk) -> set[str]:
    """Return the names of the Run's inputs that tasks of this rank read."""
    names = {
        entry.source.port
        for index in share.tasks
        for entry in share.walk.tasks[index].inputs
        if entry.source.kind is Kind.RUN
    }
    for loop in share.loops:
        names.update(v.start.port for v in share.walk.loops[loop].variables if v.start.kind is Kind.RUN)
    return names
