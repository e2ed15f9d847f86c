"""Walks and their edges: named paths through the graph, as data.

Built by plugins; drawn, checked, compiled and run by the core.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mstar_core.graph.declare.nodes import CLIENT, Attend, NodeSpec
from mstar_core.graph.declare.streams import Stream


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """Route of an output port. `to` is a node or CLIENT; `into` renames the port at the consumer.

    A port that is not produced in an iteration does not fire its edge.
    """

    port: str
    to: NodeSpec | str
    into: str | None = None
    modality: str | None = None

    @property
    def is_client(self) -> bool:
        return self.to == CLIENT

    @property
    def target_port(self) -> str:
        return self.into or self.port


@dataclass(frozen=True, slots=True)
class StreamingGraphEdge:
    """Puts the port's value on a stream to another partition."""

    port: str
    stream: Stream


Edge = GraphEdge | StreamingGraphEdge


@dataclass(frozen=True, slots=True)
class StopOn:
    """Ends a loop when the port holds one of the ids. unless: boolean parameter that switches the rule off."""

    port: str
    ids: tuple[int, ...] = ()
    unless: str | None = None


@dataclass(frozen=True, slots=True)
class StopWhen:
    """Ends a loop when the boolean port is true."""

    port: str


StopRule = StopOn | StopWhen


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One use of a node in a walk: its input ports, the edges of its outputs and its attention.

    suppress: ids that this use never draws, beside `Sampling.suppress`. Not inside loops. To force a choice among few
    ids, suppress all others.
    """

    spec: NodeSpec
    inputs: tuple[str, ...] = ()
    outputs: tuple[Edge, ...] = ()
    attend: Attend | None = None
    suppress: tuple[range, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))


@dataclass(frozen=True, slots=True, init=False)
class Sequential:
    """Parts in reading order. Their edges determine the order of execution."""

    parts: tuple[Walk, ...]

    def __init__(self, *parts: Walk) -> None:
        object.__setattr__(self, "parts", tuple(parts))


@dataclass(frozen=True, slots=True, init=False)
class Parallel:
    """Parts that do not depend on each other."""

    parts: tuple[Walk, ...]

    def __init__(self, *parts: Walk) -> None:
        object.__setattr__(self, "parts", tuple(parts))


@dataclass(frozen=True, slots=True)
class Loop:
    """Repeats `body`. The limit is the Run's `max_iters`, never a number of the graph.

    carry: output port -> input port of the next iteration. over: iterate once per chunk of the stream.
    stop: stop rule, tested on the starting value too. fused: the engine runs many iterations in one step. A fused body
    is one node without a stream. outputs: edges of the last iteration's values. save_every: number of iterations after
    which the carried values are saved, and they are saved before the last one; a request that goes on after a death
    begins the loop there. 0: never.
    """

    name: str
    body: Walk
    carry: dict[str, str] = field(default_factory=dict)
    over: Stream | None = None
    stop: StopOn | StopWhen | None = None
    fused: bool = False
    outputs: tuple[Edge, ...] = ()
    save_every: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "outputs", tuple(self.outputs))

    def __hash__(self) -> int:
        return hash((self.name, self.body))


Walk = GraphNode | Sequential | Parallel | Loop


def parts_of(walk: Walk) -> tuple[Walk, ...]:
    """Return the direct children of an element of a walk."""
    match walk:
        case GraphNode():
            return ()
        case Loop(body=body):
            return (body,)
        case Sequential(parts=parts) | Parallel(parts=parts):
            return parts


def graph_nodes(walk: Walk) -> Iterator[GraphNode]:
    """Yield every use of a node in a walk, in reading order."""
    if isinstance(walk, GraphNode):
        yield walk
    for part in parts_of(walk):
        yield from graph_nodes(part)


def loops(walk: Walk) -> Iterator[Loop]:
    """Yield every loop of a walk, outermost first."""
    if isinstance(walk, Loop):
        yield walk
    for part in parts_of(walk):
        yield from loops(part)


def edges_of(walk: Walk) -> list[Edge]:
    """Return every edge of a walk, those of its nodes before those of its loops."""
    edges = [edge for use in graph_nodes(walk) for edge in use.outputs]
    return edges + [edge for loop in loops(walk) for edge in loop.outputs]
