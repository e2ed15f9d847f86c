"""Bronze check: nodes return what their ports declare, by name, dtype and shape. Each fault is named once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mstar_core.conformance.miniature import Miniature, miniature
from mstar_core.engine.ports import DTYPES
from mstar_core.errors import EngineError, PluginError
from mstar_core.graph import GraphEdge, NodeSpec, PortType, graph_nodes, loops
from mstar_core.graph.declare.walks import StreamingGraphEdge
from mstar_core.plugin.conformance import Subject

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


def ports_as_declared(subject: Subject) -> None:
    """Serve every sample and compare the outputs of each forward with the ports of its node."""
    small = miniature(subject)
    borders = {name: Border(built.node) for name, built in small.built.items()}
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
    """Outputs of one node so far. faults: by port, one each. seen: ports of all forwards."""

    node: NodeSpec
    faults: dict[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def note(self, outputs: Mapping[str, Any]) -> None:
        """Check the outputs of one forward."""
        for port, value in outputs.items():
            self.seen.add(port)
            if port in self.node.ports and port not in self.faults:
                declared = self.node.port(port)
                axes = int(isinstance(value, torch.Tensor)) + (self.node.per == "request")
                fault = next((each for each in _items(value) if not fits(declared, each, axes)), None)
                if fault is not None:
                    kind = f"{str(fault.dtype).removeprefix('torch.')}{list(fault.shape)}"
                    self.faults[port] = f"node {self.node.name} returned {port!r} as {kind}; declared is {declared}"


def fits(declared: PortType, value: Tensor, axes: int) -> bool:
    """Return whether a value has the declared dtype and shape. axes: most axes in front: batch items, candidates."""
    if declared.dtype != "any" and value.dtype != DTYPES[declared.dtype]:
        return False
    extra = value.dim() - len(declared.shape)
    if not declared.shape:
        return True
    sizes = zip(declared.shape, value.shape[max(0, extra) :], strict=False)
    return 0 <= extra <= axes and all(isinstance(size, str) or size == actual for size, actual in sizes)


def _items(value: object) -> list[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


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
        if not isinstance(outputs, dict):
            raise EngineError(
                f"node {border.node.name} returned {type(outputs).__name__}", "a dict of tensors by port is required"
            )
        border.note(outputs)

    handle = module.register_forward_hook(look)
    try:
        yield
    finally:
        handle.remove()
