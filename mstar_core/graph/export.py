"""A model's graph as plain data (JSON form) and as dot text, for tools outside. Called by the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mstar_core.graph.compile.compiled import CompiledWalk
from mstar_core.graph.compile.wiring import compile_walk
from mstar_core.graph.spec.edges import Edge, StreamingGraphEdge
from mstar_core.graph.spec.nodes import NodeSpec
from mstar_core.graph.spec.streams import Stream
from mstar_core.graph.spec.walks import GraphNode, Loop, StopOn, Walk, parts_of

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """What drawings and exports need of a model. placement: node name -> ranks, where a placement is known."""

    name: str
    nodes: Sequence[NodeSpec]
    streams: Sequence[Stream]
    partitions: Mapping[str, Mapping[str, Walk]]
    placement: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def ranks(self, node: NodeSpec) -> tuple[int, ...]:
        """Ranks of a node; a node on another branch folds into its parent's."""
        if node.name in self.placement:
            return tuple(self.placement[node.name])
        return self.ranks(node.of) if node.of is not None else ()

    def compiled(self, partition: str) -> dict[str, CompiledWalk]:
        """The flat form of a partition's walks. Raises GraphError."""
        walks = self.partitions[partition]
        return {name: compile_walk(name, walk, self.streams) for name, walk in walks.items()}

    def consumer(self, stream: Stream) -> str | None:
        """The partition that takes a stream."""
        node, port = stream.into
        for partition, walks in self.partitions.items():
            for walk in walks.values():
                if any(use.spec.name == node.name and port in use.inputs for use in _uses(walk)):
                    return partition
        return None


def graph_to_dict(graph: Graph) -> JsonObject:
    """The JSON form: nodes, streams and partitions with their walks; only JSON types inside."""
    return {
        "name": graph.name,
        "nodes": [_node(graph, node) for node in graph.nodes],
        "streams": [_stream(graph, stream) for stream in graph.streams],
        "partitions": [
            {"name": name, "walks": {walk: _walk(part) for walk, part in walks.items()}}
            for name, walks in graph.partitions.items()
        ],
    }


def policy_text(stream: Stream) -> str:
    """A chunk policy in words, such as `SlidingWindow(window=28, stride=7, tail=drop)`."""
    facts = asdict(stream.chunk)
    if facts.pop("after_end") == "empty":
        facts["after_end"] = "empty"
    facts = {key: value for key, value in facts.items() if value is not None or key not in ("first", "first_from")}
    return f"{type(stream.chunk).__name__}({', '.join(f'{key}={value}' for key, value in facts.items())})"


def graph_to_dot(graph: Graph) -> str:
    """Graphviz text: a cluster per partition, an edge per route, streams dashed, loops as edges back."""
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


def _node(graph: Graph, node: NodeSpec) -> JsonObject:
    found: JsonObject = {"name": node.name, "engine": str(node.engine), "ports": dict(node.ports)}
    if node.kv is not None:
        found["kv"] = {**asdict(node.kv), "branches": list(node.kv.branches)}
    if node.of is not None:
        found |= {"of": node.of.name, "branch": node.branch}
    if node.sampling is not None:
        found["samples"] = node.sampling.port
    if node.tensor_parallel:
        found["tensor_parallel"] = True
    if node.doc:
        found["doc"] = node.doc
    ranks = graph.ranks(node)
    if ranks:
        found["ranks"] = list(ranks)
    return found


def _stream(graph: Graph, stream: Stream) -> JsonObject:
    found: JsonObject = {
        "name": stream.name,
        "into": {"node": stream.into[0].name, "port": stream.into[1], "partition": graph.consumer(stream)},
        "chunk": {"policy": type(stream.chunk).__name__, **asdict(stream.chunk)},
    }
    if stream.accept is not None:
        found["accept"] = [stream.accept.start, stream.accept.stop]
    if stream.flush_if is not None:
        found["flush_if"] = stream.flush_if
    return found


def _walk(walk: Walk) -> JsonObject:
    match walk:
        case GraphNode():
            found: JsonObject = {
                "kind": "node", "node": walk.spec.name, "inputs": list(walk.inputs),
                "outputs": [_edge(edge) for edge in walk.outputs],
            }  # fmt: skip
            return found if walk.attend is None else {**found, "attend": asdict(walk.attend)}
        case Loop():
            found = {"kind": "loop", "name": walk.name, "body": _walk(walk.body), "carry": dict(walk.carry)}
            found |= {"fused": walk.fused, "outputs": [_edge(edge) for edge in walk.outputs]}
            if walk.over is not None:
                found["over"] = walk.over.name
            if isinstance(walk.stop, StopOn):
                found["stop"] = {"port": walk.stop.port, "ids": list(walk.stop.ids), "unless": walk.stop.unless}
            elif walk.stop is not None:
                found["stop"] = {"port": walk.stop.port}
            return found
        case _:
            return {"kind": type(walk).__name__.lower(), "parts": [_walk(part) for part in parts_of(walk)]}


def _edge(edge: Edge) -> JsonObject:
    if isinstance(edge, StreamingGraphEdge):
        return {"port": edge.port, "stream": edge.stream.name}
    if isinstance(edge.to, NodeSpec):
        return {"port": edge.port, "to": edge.to.name, "into": edge.target_port}
    return {"port": edge.port, "to": edge.to, "modality": edge.modality}


def _uses(walk: Walk) -> list[GraphNode]:
    return [walk] if isinstance(walk, GraphNode) else [use for part in parts_of(walk) for use in _uses(part)]
