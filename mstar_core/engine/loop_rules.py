"""What starts and what stops a loop, the same for both engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import LoopSpec


def carried_values(
    loop: LoopSpec, inputs: Mapping[str, Tensor], held: Mapping[str, Tensor], node: str
) -> dict[str, Tensor]:
    """Input port -> starting value: the job's own, else what the carried port last held. Raises EngineError."""
    values = {}
    for port, into in loop.carry.items():
        value = inputs.get(into, held.get(port))
        if value is None:
            raise no_start(node, port)
        values[into] = value
    return values


def stops(loop: LoopSpec, value: Tensor) -> bool:
    """Whether a value of the stop port ends the loop: one of the stop ids, or true."""
    if loop.stop_ids:
        return any(int(item) in loop.stop_ids for item in value.reshape(-1).tolist())
    return bool(value.any())


def no_start(node: str, port: str) -> EngineError:
    """The error of a loop without a starting value."""
    return EngineError(
        f"a loop of node {node} has nothing to start from",
        f"neither an input nor an earlier value of port {port!r} is there",
        node=node,
    )
