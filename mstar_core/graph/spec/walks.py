"""Walks: a named path through the graph, as data. Built by plugins; drawn, checked, cut and executed by others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mstar_core.graph.spec.edges import Edge, Stream
from mstar_core.graph.spec.nodes import Attend, NodeSpec


@dataclass(frozen=True, slots=True)
class StopOn:
    """Ends a loop when the port holds one of the ids. `unless` names a boolean parameter that switches this off."""

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
    """One use of a node in a walk: which input ports it takes, where its outputs go, how it attends."""

    spec: NodeSpec
    inputs: tuple[str, ...] = ()
    outputs: tuple[Edge, ...] = ()
    attend: Attend | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))


@dataclass(frozen=True, slots=True, init=False)
class Sequential:
    """Parts in order; the order of execution comes from their edges."""

    parts: tuple[Walk, ...]

    def __init__(self, *parts: Walk) -> None:
        object.__setattr__(self, "parts", tuple(parts))


@dataclass(frozen=True, slots=True, init=False)
class Parallel:
    """Parts that do not wait for each other."""

    parts: tuple[Walk, ...]

    def __init__(self, *parts: Walk) -> None:
        object.__setattr__(self, "parts", tuple(parts))


@dataclass(frozen=True, slots=True)
class Loop:
    """Repeats `body`. The limit is the Run's `max_iters`, never a number of the graph.

    carry: output port -> input port of the next iteration. over: once per chunk of a stream.
    stop: tested on the starting value too. fused: the engine iterates with no scheduler round trip.
    outputs: edges of the last iteration's values.
    """

    name: str
    body: Walk
    carry: dict[str, str] = field(default_factory=dict)
    over: Stream | None = None
    stop: StopOn | StopWhen | None = None
    fused: bool = False
    outputs: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "outputs", tuple(self.outputs))

    def __hash__(self) -> int:
        return hash((self.name, self.body))


Walk = GraphNode | Sequential | Parallel | Loop


def parts_of(walk: Walk) -> tuple[Walk, ...]:
    """Direct children of a walk's element."""
    match walk:
        case GraphNode():
            return ()
        case Loop(body=body):
            return (body,)
        case Sequential(parts=parts) | Parallel(parts=parts):
            return parts


def graph_nodes(walk: Walk) -> Iterator[GraphNode]:
    """Every node use of a walk, in the order written."""
    if isinstance(walk, GraphNode):
        yield walk
    for part in parts_of(walk):
        yield from graph_nodes(part)


def loops(walk: Walk) -> Iterator[Loop]:
    """Every loop of a walk, outermost first."""
    if isinstance(walk, Loop):
        yield walk
    for part in parts_of(walk):
        yield from loops(part)
