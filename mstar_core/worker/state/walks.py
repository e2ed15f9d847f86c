"""Compiled walks of the served model and their cuts by placement, shared by all requests of a rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from mstar_core.graph.compile.compiled import ROOT, CompiledLoop, CompiledTask, CompiledWalk, Kind
from mstar_core.graph.compile.cut import RankWalk, cut
from mstar_core.graph.compile.resident import LoopPorts, resident_ports
from mstar_core.graph.compile.wiring import compile_graph
from mstar_core.graph.declare.nodes import CHUNK_FIRST, CHUNK_LAST, STATELESS, STEP
from mstar_core.messages.work import RunWalk
from mstar_core.plugin.spec import ModelSpec

CHANGING: Final = frozenset((STEP, CHUNK_FIRST, CHUNK_LAST))
"""Special inputs that differ from chunk to chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLoop:
    """A walk that is one loop over a stream around one stateless node, the usual shape of a codec.

    Its iterations follow from the stream alone, so the executor runs it without a WalkState: a chunk is one job, and
    its outputs leave. chunk: port of the chunk. changing: (port, special input) that differ per chunk. fixed: (port,
    name, is a parameter) of the other inputs. outputs: ports that leave.
    """

    loop: CompiledLoop
    task: CompiledTask
    stream: str
    chunk: str
    changing: tuple[tuple[str, str], ...]
    fixed: tuple[tuple[str, str, bool], ...]
    outputs: tuple[str, ...]

    def takes(self, message: RunWalk, given: Collection[str]) -> bool:
        """Whether a run needs no more than its chunks: no limit, no rows, no kept signals, all inputs given."""
        inputs_are_there = all(name in given for _, name, is_parameter in self.fixed if not is_parameter)
        return message.max_iters is None and message.rows == 1 and not message.keep and inputs_are_there


def stream_loop_of(share: RankWalk) -> StreamLoop | None:
    """Return the stream loop that a share is, or None."""
    walk = share.walk
    if len(walk.tasks) != 1 or len(walk.loops) != 1 or len(share.tasks) != 1:
        return None
    loop, task = walk.loops[0], walk.tasks[0]
    over = loop.loop.over
    is_plain = over is not None and loop.tap == 0 and loop.parent == ROOT and not (loop.variables or loop.results)
    has_rule = loop.stop_task is not None or loop.loop.stop is not None
    if not is_plain or has_rule or task.holds or task.node.spec.engine is not STATELESS:
        return None
    assert over is not None
    chunk, changing, fixed = "", [], []
    for entry in task.inputs:
        match entry.source.kind:
            case Kind.CHUNK:
                chunk = entry.port
            case Kind.SPECIAL if entry.source.port in CHANGING:
                changing.append((entry.port, entry.source.port))
            case Kind.SPECIAL | Kind.RUN as kind:
                fixed.append((entry.port, entry.source.port, kind is Kind.SPECIAL))
            case _:
                return None
    return StreamLoop(
        loop=loop,
        task=task,
        stream=over.name,
        chunk=chunk,
        changing=tuple(changing),
        fixed=tuple(fixed),
        outputs=tuple(dict.fromkeys(outlet.port for outlet in task.outlets)),
    )


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
        self._stream_loops: dict[int, StreamLoop | None] = {}
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

    def stream_loop(self, share: RankWalk) -> StreamLoop | None:
        """Return the stream loop that a share is, or None. share: returned by `share`, so its id stays valid."""
        if id(share) not in self._stream_loops:
            self._stream_loops[id(share)] = stream_loop_of(share)
        return self._stream_loops[id(share)]


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
