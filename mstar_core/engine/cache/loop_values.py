"""Values per sequence of a node's resident loop, as far as the host knows them: new values, and items of its stream.

The values themselves stay on the device between steps. Owned by the node's scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar_core.engine.cache.feeds import Feeds
from mstar_core.engine.ports import value_forms
from mstar_core.engine.steps.updates import LoopValuesSet
from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import keyword

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.graph.compile.resident import LoopPorts
    from mstar_core.graph.declare.nodes import NodeSpec


class LoopValues:
    """New values of a node's resident loop on their way to the device, and its stream.

    feeds: items of the stream, or None without one.
    """

    def __init__(self, spec: NodeSpec, ports: LoopPorts, slots: int, dtype: torch.dtype, most_items: int) -> None:
        self.ports = ports
        self.feeds = Feeds(slots, most_items) if ports.feed is not None else None
        self._node = spec.name
        self._names = [*(into for into, _ in ports.states), *ports.constants]
        self._forms = value_forms(spec, ports, dtype)
        self._pending: dict[str, dict[int, Tensor]] = {}

    def begin(self, slot: int, values: Mapping[str, Tensor]) -> list[LoopValuesSet]:
        """Set the values of a slot. values: by input as the walk names it. Raises EngineError for a wrong shape.

        Returns changes of values on a device; those on the host wait for `take_changes`.
        """
        return self.set(slot, {name: values[name] for name in self._names})

    def set(self, slot: int, values: Mapping[str, Tensor]) -> list[LoopValuesSet]:
        """Replace values of a slot, as `begin` does."""
        changes = []
        for name, value in values.items():
            port, value = keyword(name), self.shaped(name, value)
            pending = self._pending.setdefault(port, {})
            if value.is_cpu:
                pending[slot] = value
            else:
                pending.pop(slot, None)
                changes.append(LoopValuesSet(port, np.array([slot], dtype=np.int64), value[None]))
        return changes

    def shaped(self, name: str, value: Tensor) -> Tensor:
        """Return an input's value in its declared shape and dtype. Raises EngineError for a wrong shape.

        A pass over several tokens may have given one value for each: the last one is taken.
        """
        shape, dtype = self._forms[keyword(name)]
        if value.shape[1:] == shape and value.dim() > len(shape) and len(value) > 1:
            value = value[-1]
        if value.numel() != prod(shape):
            raise EngineError(
                f"input {keyword(name)!r} of node {self._node} has the wrong shape",
                f"{list(value.shape)}, declared {list(shape)}",
                node=self._node,
            )
        return value.reshape(shape).to(dtype)

    def take_changes(self) -> list[LoopValuesSet]:
        """Return the values from the host that have been set since the last call."""
        changes = [
            LoopValuesSet(port, np.array([*values], dtype=np.int64), torch.stack([*values.values()]))
            for port, values in self._pending.items()
            if values
        ]
        self._pending.clear()
        return changes
