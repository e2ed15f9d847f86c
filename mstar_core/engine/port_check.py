"""Comparison of values with the ports of their node: outputs of a module, inputs of its warm-up.

Used by both engines and by the conformance checks.

Cost model: names, dtypes and shapes are compared once for each set of wanted and returned ports, dtypes and ranks. A
forward after that costs one lookup in a set.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from mstar_core.engine.ports import DTYPES
from mstar_core.errors import EngineError, did_you_mean, nearest
from mstar_core.graph.declare.nodes import keyword

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.graph.declare.nodes import NodeSpec, PortType

WAY_OUT: Final = "return it in every forward, or declare the port with '?' if it may be absent"

HEAD_OUTPUTS: Final = ("hidden", "logits")
"""Outputs of a KV node that need no port: the engine gives them to the head, or makes them with it."""


SHORT: Final = {dtype: name for name, dtype in DTYPES.items()}
"""Dtypes as port types name them."""


class PortCheck:
    """Checks of one node's ports. Owned by its engine.

    Only outputs that pass are remembered: a fault ends every request that meets it, and no other.
    """

    def __init__(self, spec: NodeSpec, others: Collection[str] = ()) -> None:
        """others: outputs that need no port, because the engine alone takes them."""
        self._spec = spec
        drawn = () if spec.sampling is None else (spec.sampling.port,)
        self._others = frozenset((*others, *drawn))
        # Requests of several candidates have an axis of their own, at some nodes.
        self._axes = int(spec.per == "request")
        self._passed: set[tuple[Hashable, ...]] = set()

    def require(
        self,
        wanted: tuple[str, ...] | frozenset[str],
        given: tuple[str, ...],
        values: Mapping[str, Any],
        *,
        stacked: int = 1,
    ) -> None:
        """Raise EngineError for a missing port, or a value that does not fit its port.

        An optional port may be missing, unless an output under a name that is not a port is there in its place.

        values: outputs by port, those of `given` or some of them.
        stacked: most axes in front of a tensor's declared shape. A list of tensors has none.
        """
        key: tuple[Hashable, ...] = wanted, given, tuple([_form(value) for value in values.values()])
        if key in self._passed:
            return
        self._require_names(wanted, given)
        for port, value in values.items():
            if port in self._spec.ports:
                fault = self.fault(port, value, stacked=stacked, any_float=True)
                if fault:
                    raise EngineError(fault, "the request ends, others go on", "return what the port declares")
        self._passed.add(key)

    def require_inputs(self, giver: str, inputs: Mapping[str, object]) -> None:
        """Raise EngineError for an input that is not a port, or does not fit its port. For warm-up requests.

        giver: subject of the error, such as "warm-up 'one image'". Inputs that begin with `$` need no port.
        """
        node = self._spec.name
        for port, value in inputs.items():
            word = keyword(port)
            if word not in self._spec.ports:
                if word != port:
                    continue
                detail = f"{giver} of node {node} gives {port!r}, which is not among its ports"
                raise EngineError(detail, hint=did_you_mean(port, self._spec.ports), node=node)
            fault = self.fault(word, value, stacked=0, any_float=True, found=f"{giver} of node {node} gives")
            if fault:
                raise EngineError(
                    fault, hint=f"give {port!r} as the input of one request, without a batch dimension", node=node
                )

    def _require_names(self, wanted: Collection[str], given: Collection[str]) -> None:
        ports, node = self._spec.ports, self._spec.name
        returned = ", ".join(sorted(port for port in given if not port.startswith("$"))) or "nothing"
        unknown = undeclared(self._spec, given, self._others)
        for port in sorted(wanted):
            if port in given or port in self._others:
                continue
            declared = ports.get(port, "")
            if declared.endswith("?") and not unknown:
                continue
            near = nearest(port, unknown)
            hint = WAY_OUT if near is None else f"return {near!r} as {port!r}"
            detail = f"expected {port!r} {declared}; the module returned {returned}"
            raise EngineError(f"node {node} returned no {port!r}, which its walk takes", detail, hint, node=node)

    def fault(self, port: str, value: object, *, stacked: int = 1, any_float: bool = False, found: str = "") -> str:
        """Return what is wrong with a value of a declared port, empty if it fits.

        found: subject and verb of the text, by default that the node returned the value.
        any_float: accept every float type for a declared one: the precision of a deployment is not the node's choice.
        """
        declared, found = self._spec.port(port), found or f"node {self._spec.name} returned"
        items = list(_items(value))
        if not items:
            is_absent = isinstance(value, list | tuple) and all(item is None for item in value)
            return "" if is_absent else f"{found} {port!r} as {type(value).__name__}, not as a tensor"
        axes = self._axes + (stacked if isinstance(value, torch.Tensor) else 0)
        for item in items:
            if not fits(declared, item, axes, any_float=any_float):
                return f"{found} {port!r} as {type_of(item)}; declared is {declared}"
        return ""


def type_of(value: Tensor) -> str:
    """Return dtype and shape of a tensor as a port type is written, such as "f32[3,8]"."""
    dtype = SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return f"{dtype}[{','.join(map(str, value.shape))}]"


def fits(declared: PortType, value: Tensor, axes: int, *, any_float: bool = False) -> bool:
    """Return whether a value has the declared dtype and shape. axes: most axes in front: batch items, candidates."""
    if declared.dtype != "any" and value.dtype != DTYPES[declared.dtype]:
        if not (any_float and value.is_floating_point() and DTYPES[declared.dtype].is_floating_point):
            return False
    extra = value.dim() - len(declared.shape)
    if not declared.shape:
        return True
    sizes = zip(declared.shape, value.shape[max(0, extra) :], strict=False)
    return 0 <= extra <= axes and all(isinstance(size, str) or size == actual for size, actual in sizes)


def undeclared(spec: NodeSpec, given: Collection[str], others: Collection[str]) -> list[str]:
    """Return the outputs that are neither ports of a node nor taken by its engine alone (`others`)."""
    return sorted(port for port in given if port not in spec.ports and port not in others and not port.startswith("$"))


def require_dict(node: str, outputs: object) -> None:
    """Raise EngineError unless a module returned its outputs by port."""
    if not isinstance(outputs, dict):
        what = f"node {node} returned {type(outputs).__name__}"
        raise EngineError(what, "expected a dict of tensors by port", 'return {"port": tensor}', node=node)


def _form(value: object) -> Hashable:
    """Return what a value may differ in from one forward to the next: its dtype and rank. Lists: of the first item."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    first = next(_items(value), None)
    return type(value), None if first is None else (first.dtype, first.dim())


def _items(value: object) -> Iterator[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    yield from (each for each in values if isinstance(each, torch.Tensor))
