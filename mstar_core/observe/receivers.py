"""Receiver of a value that crosses ranks, which the counters of its sender do not name. Used by the state publisher."""

from __future__ import annotations

from mstar_core.observe.frames import GraphView, NodeView


def receiver(graph: GraphView, name: str, source: str, rank: int) -> str:
    """Return the node on `rank` that takes edge `name` from node `source`; empty if the graph does not tell.

    A value that a loop carries has no edge in the graph: it goes to a node of the same loop.
    """
    here = [node for node in graph.nodes if any(rank in group for group in node.replicas)]
    names = {node.name for node in here}
    for edge in graph.edges:
        if edge.name == name and edge.source == source and edge.into in names:
            return edge.into
    sender = next((node for node in graph.nodes if node.name == source), NodeView(name=source))
    looped = [node.name for node in here if not set(sender.loops).isdisjoint(node.loops)]
    return (looped or [node.name for node in here if len(here) == 1] or [""])[0]
