"""State machine of a walk that is one loop over a stream around one stateless node, the usual shape of a codec."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from mstar_core.graph.compile.compiled import ROOT, Kind
from mstar_core.graph.compile.cut import RankWalk
from mstar_core.graph.declare.nodes import CHUNK_FIRST, CHUNK_LAST, STATELESS, STEP
from mstar_core.graph.declare.streams import Chunk
from mstar_core.graph.runtime.actions import Actions, EndWalk, Iteration, Ref, RunInput, Special, Want
from mstar_core.graph.runtime.run_context import MaxIters
from mstar_core.graph.runtime.walk_state import WalkState

CHANGING: Final = frozenset((STEP, CHUNK_FIRST, CHUNK_LAST))
"""Special inputs that differ from chunk to chunk."""


class StreamWalk(WalkState):
    """WalkState whose iterations follow from the stream alone: each chunk is one run of the task, whose outputs leave.

    The caller runs the task with `numbers` and `fixed` for each chunk, sends its outputs to its outlets, and takes the
    next chunk. Cost model: hundreds of chunks per second and request, so a chunk needs no actions and no scope.
    """

    def __init__(self, share: RankWalk, given: Collection[str]) -> None:
        super().__init__(share, None, given)
        loop = self.walk.loops[0]
        assert loop.loop.over is not None
        self.task = self.walk.tasks[0]
        self.stream = loop.loop.over.name
        self.fixed: dict[str, Ref] = {}
        self.count = 0
        self._changing: list[tuple[str, str]] = []
        for entry in self.task.inputs:
            name = entry.source.port
            if entry.source.kind is Kind.CHUNK:
                self.chunk_port = entry.port
            elif entry.source.kind is Kind.RUN:
                self.fixed[entry.port] = RunInput(name)
            elif name in CHANGING:
                self._changing.append((entry.port, name))
            else:
                self.fixed[entry.port] = Special(name, 0)

    @staticmethod
    def fits(share: RankWalk, max_iters: MaxIters, given: Collection[str]) -> bool:
        """Return whether a run needs no more than its chunks. given: names of the Run's inputs."""
        walk = share.walk
        if max_iters is not None or len(walk.tasks) != 1 or len(walk.loops) != 1 or len(share.tasks) != 1:
            return False
        loop, task = walk.loops[0], walk.tasks[0]
        has_values = loop.variables or loop.results or task.holds
        has_rule = loop.stop_task is not None or loop.loop.stop is not None
        is_plain = loop.loop.over is not None and loop.tap == 0 and loop.parent == ROOT and not (has_values or has_rule)
        sources = [entry.source for entry in task.inputs]
        are_known = all(source.kind in (Kind.CHUNK, Kind.SPECIAL, Kind.RUN) for source in sources)
        are_given = all(source.port in given for source in sources if source.kind is Kind.RUN)
        return is_plain and are_known and are_given and task.node.spec.engine is STATELESS

    def start(self) -> Actions:
        """See WalkState."""
        return [Want(self.walk.address(0), self.stream, (0,))]

    def numbers(self, chunk: Chunk) -> dict[str, int | bool]:
        """Count a chunk and return its special inputs by port."""
        values = {STEP: self.count, CHUNK_FIRST: chunk.first, CHUNK_LAST: chunk.last}
        self.count += 1
        return {port: values[name] for port, name in self._changing}

    def stream_ended(self, address: int, iteration: Iteration) -> Actions:
        """See WalkState."""
        return self._end("done")

    def cancel(self) -> Actions:
        """See WalkState."""
        return self._end("cancelled")

    def _end(self, reason: str) -> Actions:
        if self.ended:
            return []
        self.ended = True
        return [EndWalk(reason, {self.walk.loops[0].name: self.count})]
