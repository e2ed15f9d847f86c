"""Rules for jobs that both engines share: inputs of modules, values of candidates."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import PortType

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Job
    from mstar_core.graph.declare.nodes import NodeSpec


def accepts(module: object, name: str) -> bool:
    """Return whether a module's forward has a keyword of this name, or takes any."""
    return name in _parameters(module) or any(each.kind is each.VAR_KEYWORD for each in _parameters(module).values())


def declares(module: object, name: str) -> bool:
    """Return whether a module's forward names this keyword itself."""
    return name in _parameters(module)


def taken_ports(job: Job) -> tuple[str, ...]:
    """Return the ports that a job takes from each forward: those that its walk needs, and those of its loop."""
    return (*job.outputs, *_loop_ports(job))


def required_ports(job: Job) -> tuple[str, ...]:
    """Return the ports among `taken_ports` without which a forward is wrong."""
    edges = job.edges
    outputs = job.outputs if edges is None else tuple([port for port in job.outputs if port in edges])
    return outputs if job.loop is None else (*outputs, *_loop_ports(job))


def _loop_ports(job: Job) -> tuple[str, ...]:
    loop = job.loop
    return () if loop is None else (*loop.carry, *loop.emit, *filter(None, [loop.stop_port]))


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
