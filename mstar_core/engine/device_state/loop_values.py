"""Device half of a resident loop's values: carried state and inputs that stay, one row per slot.

A step gathers the rows of its sequences before the module and stores the new state after it. Stream items and random
numbers reach it with the step's other host values.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
import torch

from mstar_core.engine.attention.staging import port_field
from mstar_core.engine.ports import value_forms
from mstar_core.engine.transfers import upload
from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import RANDOM, keyword
from mstar_core.layers import rng

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.staging import Fields
    from mstar_core.engine.device_state.slots import DeviceSlots
    from mstar_core.engine.steps.plan import DecodeBatch, DecodePlan
    from mstar_core.graph.compile.resident import LoopPorts
    from mstar_core.graph.declare.nodes import NodeSpec


class DeviceLoopValues:
    """Values of a node's resident loop. Owned by its runner.

    arrays: by port, [slots + 1, *declared shape]; the last row is the spare slot's and stays zero.
    """

    def __init__(self, spec: NodeSpec, ports: LoopPorts, slots: DeviceSlots, dtype: torch.dtype) -> None:
        self.ports = ports
        self._node = spec.name
        self.arrays: dict[str, Tensor] = {}
        for name, (shape, kind) in value_forms(spec, ports, dtype).items():
            self.arrays[name] = torch.zeros((slots.count + 1, *shape), dtype=kind, device=slots.device)
        self._random_port = keyword(RANDOM)
        self._random_shape = tuple(int(size) for size in spec.port(self._random_port).shape) if ports.random else ()
        self._random_name = crc32(f"{spec.name}{RANDOM}".encode())
        # Padding keeps the zeros of the spare row, as a stopped sequence keeps its state.
        slots.stopped[slots.spare] = True

    def set(self, port: str, slots: np.ndarray, values: Tensor) -> None:
        """Set a port's values in these slots (int64 [n]): [n, ...] on host or device."""
        array = self.arrays[port]
        array.index_copy_(0, upload(slots, array.device), upload(values, array.device).to(array.dtype))

    def state(self, slot: int, port: str) -> Tensor | None:
        """Return a copy of a carried value by the output that gives it; None for another port."""
        into = next((into for into, out in self.ports.states if out == port), None)
        return None if into is None else self.arrays[into][slot].clone()

    # -- host values of a step ---------------------------------------------------------------------------------------

    def fields(self, count: int) -> Fields:
        """Return the staging fields of so many sequences."""
        fields: dict[str, tuple[torch.dtype, int]] = {}
        if self.ports.feed is not None:
            fields[port_field(self.ports.feed)] = torch.int64, count
        if self.ports.random:
            fields[port_field(self._random_port)] = torch.float32, count * prod(self._random_shape)
        return fields

    def random_states(self, batch: DecodeBatch) -> np.ndarray:
        """Return the states of a batch's random numbers, int64 [n]. They change with its membership only."""
        seeds = [rng.to_int64(sampling.seed) for sampling in batch.sampling] if self.ports.random else []
        return rng.named_host(np.array(seeds, dtype=np.int64), self._random_name)

    def values(self, plan: DecodePlan, states: np.ndarray) -> dict[str, np.ndarray]:
        """Return the host values of a step. states: the batch's `random_states`."""
        values: dict[str, np.ndarray] = {}
        if self.ports.feed is not None and plan.items is not None:
            values[port_field(self.ports.feed)] = plan.items
        if self.ports.random:
            numbers = rng.uniforms_host(states, plan.drawn, prod(self._random_shape))
            values[port_field(self._random_port)] = numbers
        return values

    # -- device values of a step -------------------------------------------------------------------------------------

    def inputs(self, slots: Tensor, host: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the module's ports by keyword, one value per sequence: [n, *shape].

        slots: int64 [n]; host: `values` on the device. The feed is int64 [n].
        """
        ports = {port: array.index_select(0, slots) for port, array in self.arrays.items()}
        if self.ports.feed is not None:
            ports[self.ports.feed] = host[port_field(self.ports.feed)]
        if self.ports.random:
            numbers = host[port_field(self._random_port)]
            ports[self._random_port] = numbers.view(len(slots), *self._random_shape)
        return ports

    def store(
        self, slots: Tensor, before: Mapping[str, Tensor], outputs: Mapping[str, Tensor], stopped: Tensor
    ) -> None:
        """Replace the state of these slots by the module's outputs. Sequences in `stopped` (bool [n]) keep theirs.

        before: the module's ports. Raises EngineError for a missing output or one that is not one value per sequence.
        """
        for into, out in self.ports.states:
            old, new = before[into], outputs.get(out)
            if new is None or new.numel() != old.numel():
                raise EngineError(
                    f"node {self._node} did not give {out!r}, which its loop carries, once per sequence",
                    f"expected {list(old.shape)}" + ("" if new is None else f", found {list(new.shape)}"),
                    node=self._node,
                )
            keeps = stopped.view(-1, *(1 for _ in old.shape[1:]))
            self.arrays[into].index_copy_(0, slots, torch.where(keeps, old, new.reshape(old.shape).to(old.dtype)))
