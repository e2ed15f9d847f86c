"""Flat, immutable form of a walk: tasks, loops and the source of every value. Built by wiring, cut by placement.

A *frame* is a body in which each task runs once: the root of the walk (ROOT) or one iteration of a loop. A source is
named inside one frame; a value enters a loop from outside as a carried variable or as an import of the loop.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from mstar_core.graph.declare.streams import Stream
from mstar_core.graph.declare.walks import GraphNode, Loop

ROOT: Final = -1
"""The frame of a walk outside all loops."""


class Kind(enum.IntEnum):
    """Kind of a source, as seen in its frame."""

    TASK = 0
    LOOP = 1
    VAR = 2
    IMPORT = 3
    CHUNK = 4
    RUN = 5
    SPECIAL = 6


class Source(NamedTuple):
    """One origin of values.

    TASK: output `port` of task `at`. LOOP: `port` of the last iteration of loop `at`. VAR: carried input port of
    loop `at`. IMPORT: number `port` of `imports` of loop `at`. CHUNK: a chunk taken at address `at`.
    RUN: the Run's input called `port`. SPECIAL: STEP, RANDOM, CHUNK_FIRST, CHUNK_LAST or `$param:name`.
    """

    kind: Kind
    at: int
    port: str


@dataclass(frozen=True, slots=True)
class TaskInput:
    """One input port of a task."""

    port: str
    source: Source
    optional: bool


@dataclass(frozen=True, slots=True)
class Outlet:
    """Exit of a produced port from the walk: to the client with `modality`, or onto `stream`."""

    port: str
    modality: str | None = None
    stream: Stream | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledTask:
    """One use of a node. path: enclosing loops, outermost first.

    used: output ports with a consumer in the walk. holds: ports whose last value a later Run may start from.
    edges: ports that an edge of this walk takes, so that its module must return them.
    """

    index: int
    node: GraphNode
    path: tuple[int, ...]
    inputs: tuple[TaskInput, ...]
    outlets: tuple[Outlet, ...]
    used: tuple[str, ...]
    holds: tuple[str, ...]
    edges: frozenset[str]

    @property
    def name(self) -> str:
        return self.node.spec.name

    @property
    def frame(self) -> int:
        return self.path[-1] if self.path else ROOT


@dataclass(frozen=True, slots=True)
class Variable:
    """A carried port of a loop: `port` is the input, `out` the output that feeds the next iteration.

    start: source in the parent's frame. RUN starts from the Run's value, or else from the last value of `held`
    (node, port). back: source in the loop's own frame.
    """

    port: str
    out: str
    start: Source
    back: Source
    held: tuple[str, str]


@dataclass(frozen=True, slots=True)
class LoopResult:
    """A port that a loop hands out when it ends. variable: the carried port whose final value it is, or None."""

    port: str
    back: Source
    variable: str | None
    outlets: tuple[Outlet, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLoop:
    """One loop. path: enclosing loops; tasks and loops: direct parts of the body.

    stop_task: the task that produces the stop port. tap: the task that takes the stream's chunk.
    runs_in_engine: the engine iterates the loop as one job (a body of one node, and no stream or one that feeds a
    resident loop, see `resident.loop_ports`).
    """

    index: int
    loop: Loop
    path: tuple[int, ...]
    tasks: tuple[int, ...]
    loops: tuple[int, ...]
    variables: tuple[Variable, ...]
    imports: tuple[Source, ...]
    results: tuple[LoopResult, ...]
    stop_task: int | None
    tap: int | None
    runs_in_engine: bool

    @property
    def name(self) -> str:
        return self.loop.name

    @property
    def parent(self) -> int:
        return self.path[-1] if self.path else ROOT

    def variable(self, port: str) -> Variable | None:
        """Return the carried variable of input `port`, if there is one."""
        return next((variable for variable in self.variables if variable.port == port), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledWalk:
    """A walk ready to be cut and run. Immutable; shared by all requests.

    An *address* is one integer for a task (its index) or for a loop (number of tasks + its index).
    taps: task -> stream that it takes one chunk of per run, without a loop over that stream.
    """

    name: str
    tasks: tuple[CompiledTask, ...]
    loops: tuple[CompiledLoop, ...]
    taps: Mapping[int, str]

    @property
    def root_tasks(self) -> tuple[int, ...]:
        return tuple(task.index for task in self.tasks if not task.path)

    @property
    def root_loops(self) -> tuple[int, ...]:
        return tuple(loop.index for loop in self.loops if not loop.path)

    def address(self, loop: int) -> int:
        """Return the address of a loop."""
        return len(self.tasks) + loop

    def frame_tasks(self, frame: int) -> tuple[int, ...]:
        """Return the tasks directly in a frame."""
        return self.root_tasks if frame == ROOT else self.loops[frame].tasks

    def frame_loops(self, frame: int) -> tuple[int, ...]:
        """Return the loops directly in a frame."""
        return self.root_loops if frame == ROOT else self.loops[frame].loops

    def tasks_within(self, loop: int) -> tuple[int, ...]:
        """Return every task of a loop's body, nested loops included."""
        return tuple(task.index for task in self.tasks if loop in task.path)

    def feeding(self, source: Source) -> set[int]:
        """Return the tasks that produce a source within one pass, without the way back of carried ports."""
        match source.kind:
            case Kind.TASK:
                return {source.at}
            case Kind.LOOP:
                backs = [result.back for result in self.loops[source.at].results if result.port == source.port]
                return {task for back in backs for task in self.feeding(back)}
            case Kind.VAR:
                variable = self.loops[source.at].variable(source.port)
                return self.feeding(variable.start) if variable is not None else set()
            case Kind.IMPORT:
                return self.feeding(self.loops[source.at].imports[int(source.port)])
            case _:
                return set()
