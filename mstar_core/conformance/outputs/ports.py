"""Bronze check: nodes return what their ports declare, by name, dtype and shape. Each fault is named once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from mstar_core.conformance.miniature import Miniature, miniature
from mstar_core.engine.module import node_module
from mstar_core.engine.port_check import HEAD_OUTPUTS, PortCheck, require_dict, undeclared
from mstar_core.errors import PluginError
from mstar_core.graph import GraphEdge, NodeSpec, graph_nodes, loops
from mstar_core.graph.declare.walks import StreamingGraphEdge
from mstar_core.plugin.conformance import Subject

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


def ports_as_declared(subject: Subject) -> None:
    """Serve every sample and compare the outputs of each forward with the ports of its node."""
    small = miniature(subject)
    borders = {
        name: Border(built.node, (*HEAD_OUTPUTS, *node_module(built.module).head_ports))
        for name, built in small.built.items()
    }
    with ExitStack() as stack:
        for name, border in borders.items():
            stack.enter_context(_watched(small.built[name].module, border))
        for ask in small.asks:
            small.runtime().ask(ask)
    faults = [fault for border in borders.values() for fault in border.faults.values()]
    faults += [fault for name, border in borders.items() for fault in _absent(small, name, border)]
    if faults:
        title, *others = faults
        raise PluginError(title, "; ".join(others), "declare what the node returns, or return what it declares")


@dataclass(slots=True)
class Border:
    """Outputs of one node so far. others: outputs that need no port. faults: by port. seen: ports of all forwards."""

    node: NodeSpec
    others: Collection[str] = ()
    faults: dict[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def note(self, outputs: Mapping[str, Any]) -> None:
        """Check the outputs of one forward."""
        for port in undeclared(self.node, outputs, self.others):
            self.faults[port] = f"node {self.node.name} returned {port!r}, which is not among its ports"
        for port, value in outputs.items():
            self.seen.add(port)
            if port in self.node.ports and port not in self.faults:
                fault = PortCheck(self.node).fault(port, value)
                if fault:
                    self.faults[port] = fault


def _absent(small: Miniature, name: str, border: Border) -> Iterator[str]:
    """Yield the output ports that an edge takes and no forward returned, if the node ran at all."""
    node = border.node
    drawn = {node.sampling.port} if node.sampling is not None else set()
    wired: set[str] = set()
    for partition in small.spec.partitions:
        for walk in partition.walks.values():
            uses = [use for use in graph_nodes(walk) if use.spec.owner.name == name]
            wired |= {
                edge.port for use in uses for edge in use.outputs if isinstance(edge, GraphEdge | StreamingGraphEdge)
            }
            if len({use.spec.owner.name for use in graph_nodes(walk)}) == 1 and uses:
                wired |= {edge.port for loop in loops(walk) for edge in loop.outputs}
    for port in sorted(wired - border.seen - drawn):
        if border.seen and not (port in node.ports and node.port(port).optional):
            yield f"node {name} returned no {port!r}, which an edge takes; it returned {', '.join(sorted(border.seen))}"


@contextmanager
def _watched(module: nn.Module, border: Border) -> Iterator[None]:
    def look(_: nn.Module, args: object, outputs: object) -> None:
        require_dict(border.node.name, outputs)
        border.note(cast("dict[str, Any]", outputs))

    handle = module.register_forward_hook(look)
    try:
        yield
    finally:
        handle.remove()
