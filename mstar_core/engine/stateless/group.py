"""Lockstep of a stateless node in a group of ranks: the leader sends the ports of each forward to its followers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mstar_core.engine.group import plans

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_core.engine.group.link import GroupEnded, PlanSender
    from mstar_core.parallel.collectives import TorchCollectives


class StatelessLead:
    """Sends the forwards of one node, before the leader runs them itself. Owned by the node's engine."""

    def __init__(self, node: str, sender: PlanSender, collectives: TorchCollectives) -> None:
        self._node = node
        self._sender = sender
        self._collectives = collectives

    def publish(self, ports: Mapping[str, Any]) -> dict[str, object]:
        """Send the ports of a forward and return them, contiguous. Raises GroupEnded if a follower is gone."""
        tensors: dict[str, list[Tensor]] = {}
        arrays: dict[str, list[np.ndarray]] = {}
        listed = [name for name, value in ports.items() if isinstance(value, list)]
        for name, value in ports.items():
            values = value if isinstance(value, list) else [value]
            if isinstance(values[0], np.ndarray):
                arrays[name] = values
            else:
                tensors[name] = [each.contiguous() for each in values]
        forward = plans.Forward(node=self._node, tensors=tensors, arrays=arrays, listed=listed)
        for value in self._sender.publish(forward):
            self._collectives.broadcast(value)
        return ports_of(forward)

    def failed(self, error: Exception) -> GroupEnded:
        """Return the end of the group after a forward that was sent and failed."""
        return self._sender.failed(f"node {self._node}: {type(error).__name__}: {error}")


class StatelessFollower:
    """Runs the leader's forwards on this rank and drops the outputs, which equal the leader's. See `NodeFollower`."""

    def __init__(self, module: nn.Module, collectives: TorchCollectives) -> None:
        self._module = module
        self._collectives = collectives

    def run(self, plan: plans.Plan, shared: Sequence[Tensor] = ()) -> int | None:
        """Execute a plan. shared: device tensors that the leader broadcasts."""
        if isinstance(plan, plans.Forward):
            with torch.inference_mode():
                for value in shared:
                    self._collectives.broadcast(value)
                self._module(**ports_of(plan))
        return None


def ports_of(forward: plans.Forward) -> dict[str, object]:
    """Return the ports that a forward is called with."""
    values: dict[str, list[Tensor] | list[np.ndarray]] = {**forward.tensors, **forward.arrays}
    return {name: value if name in forward.listed else value[0] for name, value in values.items()}
