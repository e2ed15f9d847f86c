"""Graph of a model, the input of its drawing, JSON and dot forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from mstar_core.graph import CompiledWalk, NodeSpec, Stream, Walk, compile_graph, graph_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The graph of a model."""

    name: str
    nodes: Sequence[NodeSpec]
    streams: Sequence[Stream]
    partitions: Mapping[str, Mapping[str, Walk]]

    def compiled(self, partition: str) -> dict[str, CompiledWalk]:
        """Return the compiled walks of a partition. Raises GraphError."""
        return compile_graph(self.partitions[partition], self.streams)

    def consumer(self, stream: Stream) -> str | None:
        """Return the partition that takes a stream."""
        node, port = stream.into
        for partition, walks in self.partitions.items():
            for walk in walks.values():
                if any(use.spec.name == node.name and port in use.inputs for use in graph_nodes(walk)):
                    return partition
        return None


def policy_text(stream: Stream) -> str:
    """Return a chunk policy as text, such as `SlidingWindow(window=28, stride=7, tail=drop)`."""
    facts = asdict(stream.chunk)
    if facts.pop("after_end") == "empty":
        facts["after_end"] = "empty"
    facts = {key: value for key, value in facts.items() if value is not None or key not in ("first", "first_from")}
    return f"{type(stream.chunk).__name__}({', '.join(f'{key}={value}' for key, value in facts.items())})"
