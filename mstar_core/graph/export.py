"""Graph of a model, the input of its drawing, JSON and dot forms; and the dot form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from mstar_core.graph.compile.compiled import CompiledWalk
from mstar_core.graph.compile.wiring import compile_walk
from mstar_core.graph.spec.nodes import NodeSpec
from mstar_core.graph.spec.streams import Stream
from mstar_core.graph.spec.walks import GraphNode, Walk, parts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The graph of a model. placement: ranks by node name, if known."""

    name: str
    nodes: Sequence[NodeSpec]
    streams: Sequence[Stream]
    partitions: Mapping[str, Mapping[str, Walk]]
    placement: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def ranks(self, node: NodeSpec) -> tuple[int, ...]:
        """Return the ranks of a node; a branch node defaults to those of its parent."""
        if node.name in self.placement:
            return tuple(self.placement[node.name])
        return self.ranks(node.of) if node.of is not None else ()

    def compiled(self, partition: str) -> dict[str, CompiledWalk]:
        """Return the compiled walks of a partition. Raises GraphError."""
        walks = self.partitions[partition]
        return {name: compile_walk(name, walk, self.streams) for name, walk in walks.items()}

    def consumer(self, stream: Stream) -> str | None:
        """Return the partition that takes a stream."""
        node, port = stream.into
        for partition, walks in self.partitions.items():
            for walk in walks.values():
                if any(use.spec.name == node.name and port in use.inputs for use in _uses(walk)):
                    return partition
        return None


def policy_text(stream: Stream) -> str:
    """Return a chunk policy as text, such as `SlidingWindow(window=28, stride=7, tail=drop)`."""
    facts = asdict(stream.chunk)
    if facts.pop("after_end") == "empty":
        facts["after_end"] = "empty"
    facts = {key: value for key, value in facts.items() if value is not None or key not in ("first", "first_from")}
    return f"{type(stream.chunk).__name__}({', '.join(f'{key}={value}' for key, value in facts.items())})"


def graph_to_dot(graph: Graph) -> str:
    """Return Graphviz text: a cluster per partition, an edge per route, dashed streams, back edges for loops."""
    lines = [f"digraph {_quoted(graph.name)} {{", "  rankdir=LR;", "  node [shape=box, fontname=monospace];"]
    edges: dict[str, None] = {}
    for number, partition in enumerate(graph.partitions):
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(partition)};"]
        names: dict[str, str] = {}
        for walk in graph.compiled(partition).values():
            for task in walk.tasks:
                ranks = graph.ranks(task.node.spec)
                where = f"\\nrank {', '.join(map(str, ranks))}" if ranks else ""
                names[task.name] = f'    {_quoted(task.name)} [label="{_escaped(task.name)}{where}"];'
            edges |= dict.fromkeys(_dot_edges(walk))
        lines += [*names.values(), "  }"]
    for stream in graph.streams:
        label = _quoted(f"{stream.name} {policy_text(stream)}")
        edges[f"  {_quoted('~' + stream.name)} -> {_quoted(stream.into[0].name)} [style=dashed, label={label}];"] = None
        lines.append(f"  {_quoted('~' + stream.name)} [shape=cds, label={_quoted(stream.name)}];")
    return "\n".join([*lines, *edges, "}", ""])


def _dot_edges(walk: CompiledWalk) -> list[str]:
    lines = []
    for task in walk.tasks:
        for entry in task.inputs:
            for giver in sorted(walk.feeding(entry.source)):
                lines.append(_dot_edge(walk.tasks[giver].name, task.name, entry.port))
        for outlet in task.outlets:
            target = f"[{outlet.modality}]" if outlet.stream is None else f"~{outlet.stream.name}"
            lines.append(_dot_edge(task.name, target, outlet.port))
    for loop in walk.loops:
        for variable in loop.variables:
            takers = [t for t in walk.tasks_within(loop.index) if variable.port in walk.tasks[t].node.inputs]
            for giver in sorted(walk.feeding(variable.back)):
                label = f"{variable.out}, {loop.name}"
                lines += [
                    _dot_edge(walk.tasks[giver].name, walk.tasks[taker].name, label, ", constraint=false")
                    for taker in takers
                ]
        for result in loop.results:
            for outlet in result.outlets:
                target = f"[{outlet.modality}]" if outlet.stream is None else f"~{outlet.stream.name}"
                givers = sorted(walk.feeding(result.back))
                lines += [_dot_edge(walk.tasks[giver].name, target, outlet.port) for giver in givers]
    return lines


def _dot_edge(start: str, end: str, label: str, more: str = "") -> str:
    return f"  {_quoted(start)} -> {_quoted(end)} [label={_quoted(label)}{more}];"


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _uses(walk: Walk) -> list[GraphNode]:
    return [walk] if isinstance(walk, GraphNode) else [use for part in parts_of(walk) for use in _uses(part)]
