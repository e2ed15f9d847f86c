"""The walks of the served model as one rank runs them: compiled once, cut once per placement, shared by requests."""

from __future__ import annotations

from collections.abc import Mapping

from mstar_core.graph.compile.compiled import CompiledWalk, Kind
from mstar_core.graph.compile.cut import RankWalk, cut
from mstar_core.graph.compile.wiring import compile_graph
from mstar_core.plugin.spec import ModelSpec
from mstar_core.worker.stream_loop import Relay, relay_of


class RankWalks:
    """Compiled walks and their cuts by placement. Owned by the executor."""

    def __init__(self, spec: ModelSpec, rank: int) -> None:
        self._rank = rank
        walks = {name: walk for partition in spec.partitions for name, walk in partition.walks.items()}
        self._compiled: dict[str, CompiledWalk] = compile_graph(walks, spec.streams)
        self._aliases = dict(spec.walk_aliases)
        self._shares: dict[tuple[str, tuple[tuple[str, int], ...]], RankWalk] = {}
        self._relays: dict[int, Relay | None] = {}
        self._loop_keepers: dict[int, bool] = {}

    def share(self, walk: str, homes: Mapping[str, int]) -> RankWalk:
        """This rank's share of a walk under a placement of its nodes."""
        compiled = self._compiled[self._aliases.get(walk, walk)]
        nodes = {task.name for task in compiled.tasks}
        placed = tuple(sorted((node, rank) for node, rank in homes.items() if node in nodes))
        key = (compiled.name, placed)
        if key not in self._shares:
            self._shares[key] = cut(compiled, {**dict(placed)})[self._rank]
        return self._shares[key]

    def keeps_for_loops(self, share: RankWalk) -> bool:
        """Whether a task of a share has cached tokens that live only as long as their loop."""
        if id(share) not in self._loop_keepers:
            uses = (share.walk.tasks[index].node.attend for index in share.tasks)
            self._loop_keepers[id(share)] = any(attend is not None and attend.keep == "loop" for attend in uses)
        return self._loop_keepers[id(share)]

    def relay(self, share: RankWalk) -> Relay | None:
        """The relay that a share is, or None. share: one of `share`, which are kept for good."""
        if id(share) not in self._relays:
            self._relays[id(share)] = relay_of(share)
        return self._relays[id(share)]


def run_inputs(share: RankWalk) -> set[str]:
    """Names of the Run's inputs that tasks of this rank read."""
    names = {
        entry.source.port
        for index in share.tasks
        for entry in share.walk.tasks[index].inputs
        if entry.source.kind is Kind.RUN
    }
    for loop in share.loops:
        names.update(v.start.port for v in share.walk.loops[loop].variables if v.start.kind is Kind.RUN)
    return names
