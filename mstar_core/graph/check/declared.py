"""What a model declares, and what was found wrong with it so far. Made by the graph check, shared by its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mstar_core.errors import GraphError, did_you_mean
from mstar_core.graph.spec.edges import Stream
from mstar_core.graph.spec.nodes import NodeSpec


@dataclass(slots=True)
class Declared:
    """Names that a graph may refer to. problems: in the order found."""

    nodes: Mapping[str, NodeSpec]
    streams: tuple[Stream, ...]
    params: frozenset[str]
    problems: list[GraphError] = field(default_factory=list)

    def problem(self, text: str, place: str, hint: str = "") -> None:
        self.problems.append(GraphError(text, hint=hint, place=place))

    def param(self, name: str, place: str, where: str) -> None:
        if name not in self.params:
            self.problem(
                f"{where} names parameter {name!r}, which the model does not have",
                place,
                did_you_mean(name, self.params),
            )

    def has_port(self, spec: NodeSpec, port: str, text: str, place: str) -> bool:
        """Report a port that the node lacks."""
        if port in spec.ports:
            return True
        self.problem(
            f"{text} port {port!r}, which node {spec.name!r} does not have", place, did_you_mean(port, spec.ports)
        )
        return False
