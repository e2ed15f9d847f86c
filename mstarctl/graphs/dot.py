"""Dot form of a graph, for Graphviz."""

from __future__ import annotations

from mstar_core.graph import CompiledWalk
from mstarctl.graphs.graph import Graph, policy_text


def graph_to_dot(graph: Graph) -> str:
    """Return Graphviz text: a cluster per partition, an edge per route, dashed streams, back edges for loops."""
    lines = [f"digraph {_quoted(graph.name)} {{", "  rankdir=LR;", "  node [shape=box, fontname=monospace];"]
    edges: dict[str, None] = {}
    for number, partition in enumerate(graph.partitions):
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(partition)};"]
        names: dict[str, str] = {}
        for walk in graph.compiled(partition).values():
            for task in walk.tasks:
                names[task.name] = f"    {_quoted(task.name)} [label={_quoted(task.name)}];"
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
