"""Rules for jobs that both engines share: inputs of modules, values of candidates, start and stop of loops."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import PortType

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import LoopSpec
    from mstar_core.graph.declare.nodes import NodeSpec


def accepts(module: object, name: str) -> bool:
    """Return whether a module's forward has a keyword of this name, or takes any."""
    return name in _parameters(module) or any(each.kind is each.VAR_KEYWORD for each in _parameters(module).values())


def declares(module: object, name: str) -> bool:
    """Return whether a module's forward names this keyword itself."""
    return name in _parameters(module)


def _parameters(module: object) -> Mapping[str, inspect.Parameter]:
    forward = getattr(module, "forward", module)
    assert callable(forward)
    return inspect.signature(forward).parameters


class CandidateInputs:
    """Splits the inputs of a job among its candidates, by the declared ranks of one node's ports.

    A value of the declared rank is shared by all candidates. With one more dimension in front, of one entry per
    candidate, each gets its own. Numbers (0-d) are shared. A port without a declared shape is split if its first
    dimension has one entry per candidate.
    """

    def __init__(self, spec: NodeSpec) -> None:
        self._node = spec.name
        shapes = {name: PortType.parse(text).shape for name, text in spec.ports.items()}
        self._rank = {name: len(shape) for name, shape in shapes.items() if shape}

    def is_split(self, name: str, value: Tensor, count: int) -> bool:
        """Return whether each candidate gets a value of its own. Raises EngineError for any other shape."""
        rank = self._rank.get(name)
        if not value.dim() or value.dim() == rank:
            return False
        if rank in (None, value.dim() - 1) and value.shape[0] == count:
            return True
        raise EngineError(
            f"port {name!r} of node {self._node} does not hold one value per candidate",
            f"{count} candidates, shape {list(value.shape)}"
            + ("" if rank is None else f", {rank} dimensions without candidates"),
            "give one value for all candidates, or one for each on a first axis",
            node=self._node,
        )

    def split(self, inputs: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
        """Return each candidate's inputs. Raises EngineError as `is_split` does."""
        split = {name: value.unbind(0) for name, value in inputs.items() if self.is_split(name, value, count)}
        return [
            {name: split[name][index] if name in split else value for name, value in inputs.items()}
            for index in range(count)
        ]


def carried_values(
    loop: LoopSpec, inputs: Mapping[str, Tensor], last: Mapping[str, Tensor], node: str
) -> dict[str, Tensor]:
    """Return input port -> starting value: the job's own, else the carried port's last. Raises EngineError."""
    values = {}
    for port, into in loop.carry.items():
        value = inputs.get(into, last.get(port))
        if value is None:
            raise no_start(node, port)
        values[into] = value
    return values


def stops(loop: LoopSpec, value: Tensor) -> bool:
    """Return whether a value of the stop port ends the loop: one of the stop ids, or true."""
    return holds_id(value, loop.stop_ids) if loop.stop_ids else bool(value.any())


def holds_id(value: Tensor, ids: Collection[int]) -> bool:
    """Return whether any item of a value is one of these ids."""
    return any(int(item) in ids for item in value.reshape(-1).tolist())


def no_start(node: str, port: str) -> EngineError:
    """Return the error of a loop without a starting value."""
    return EngineError(
        f"a loop of node {node} has nothing to start from",
        f"port {port!r} has neither an input nor an earlier value",
        node=node,
    )
