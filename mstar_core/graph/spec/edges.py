"""Edges: routes of output ports to nodes, to the client and onto streams."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_core.graph.spec.nodes import CLIENT, NodeSpec
from mstar_core.graph.spec.streams import Stream


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
