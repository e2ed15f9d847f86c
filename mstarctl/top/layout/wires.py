"""Wires between the boxes of the graph drawing, with their current rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mstar_core.observe.frames import EdgeStatus, EdgeView, GraphView, NodeStatus, NodeView
from mstarctl.top.data.view import View

IN: Final = "<"
OUT: Final = ">"
"""First character of the keys of terminals, which stand for the client's inputs and outputs: `<audio`, `>text`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """All edges from one box to another. items_s, bytes_s: None if not measured."""

    source: str
    into: str
    names: tuple[str, ...]
    walks: frozenset[str]
    is_stream: bool = False
    chunk: str = ""
    items_s: float | None = None
    bytes_s: float | None = None


def graph_of(view: View) -> GraphView:
    """Return the graph of the deployment; until it is known, one made from the active nodes and edges."""
    if view.store.graph.nodes:
        return view.store.graph
    by_name: dict[str, list[NodeStatus]] = {}
    for node in view.store.nodes.values():
        by_name.setdefault(node.name, []).append(node)
    nodes = [
        NodeView(name=name, partition=found[0].partition, replicas=[[node.rank] for node in found])
        for name, found in sorted(by_name.items())
    ]
    known = {(edge.name, edge.source, edge.into): edge for edge in view.store.edges.values()}
    edges = [EdgeView(name=e.name, source=e.source, into=e.into, is_stream=e.is_stream) for e in known.values()]
    partitions = list(dict.fromkeys(node.partition for node in nodes))
    return GraphView(model=view.store.deployment.model, nodes=nodes, edges=edges, partitions=partitions)


def wires(graph: GraphView, live: Iterable[EdgeStatus]) -> list[Wire]:
    """Group the edges between two boxes into one wire. Self-loops are left out: the box shows them."""
    rates: dict[tuple[str, str, str], tuple[float, float]] = {}
    for measured in live:
        ends = (measured.name, measured.source, measured.into)
        items, size = rates.get(ends, (0.0, 0.0))
        rates[ends] = (items + measured.items_s, size + measured.bytes_s)
    names = {node.name for node in graph.nodes}
    grouped: dict[tuple[str, str], list[EdgeView]] = {}
    for edge in graph.edges:
        source = edge.source or f"{IN}{edge.modality or edge.name}"
        into = edge.into or f"{OUT}{edge.modality or edge.name}"
        if source == into or any(end not in names and end[:1] not in (IN, OUT) for end in (source, into)):
            continue
        grouped.setdefault((source, into), []).append(edge)
    return [_wire(ends, edges, rates) for ends, edges in grouped.items()]


def _wire(
    ends: tuple[str, str], edges: Sequence[EdgeView], rates: Mapping[tuple[str, str, str], tuple[float, float]]
) -> Wire:
    measured = [found for edge in edges if (found := rates.get((edge.name, edge.source, edge.into))) is not None]
    return Wire(
        source=ends[0],
        into=ends[1],
        names=tuple(dict.fromkeys(edge.name for edge in edges)),
        walks=frozenset(walk for edge in edges for walk in edge.walks),
        is_stream=any(edge.is_stream for edge in edges),
        chunk=next((edge.chunk for edge in edges if edge.chunk), ""),
        items_s=sum(items for items, _ in measured) if measured else None,
        bytes_s=sum(size for _, size in measured) if measured else None,
    )


def acyclic(names: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs without those that would close a cycle with earlier ones."""
    after: dict[str, set[str]] = {name: set() for name in names}
    kept = []
    for source, into in pairs:
        if source == into or source not in after or into not in after or _reaches(after, into, source):
            continue
        after[source].add(into)
        kept.append((source, into))
    return kept


def _reaches(after: Mapping[str, set[str]], start: str, goal: str) -> bool:
    seen, todo = {start}, [start]
    while todo:
        here = todo.pop()
        if here == goal:
            return True
        fresh = after[here] - seen
        seen |= fresh
        todo += fresh
    return False


def levels(names: Sequence[str], pairs: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Return the length of the longest path to each name, without pairs that close a cycle."""
    kept = acyclic(names, pairs)
    level = dict.fromkeys(names, 0)
    for _ in names:
        for source, into in kept:
            level[into] = max(level[into], level[source] + 1)
    return level
