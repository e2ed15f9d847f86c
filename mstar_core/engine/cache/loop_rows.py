"""Rows of a node's resident loop: carried state and inputs that stay on the device, stream items on the host.

One row per slot. A step gathers the rows of its sequences before the module and stores the new state after it; stream
items and random numbers reach it with the step's other host values. Owned by the KV engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np
import torch

from mstar_core.engine.attention.staging import port_field
from mstar_core.engine.cache.feeds import Feeds
from mstar_core.engine.transfers import upload
from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import RANDOM, keyword
from mstar_core.layers import rng

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.staging import Fields
    from mstar_core.engine.cache.slots import Slots
    from mstar_core.graph.compile.resident import LoopPorts
    from mstar_core.graph.declare.nodes import NodeSpec

DTYPES: Final = {
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "u8": torch.uint8,
    "b8": torch.bool,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
}


class LoopRows:
    """Values per sequence of a node's resident loop.

    arrays: by port, [slots + 1, *declared shape] on the device; the last row is the spare slot's and stays zero.
    feeds: items of the stream, or None without one.
    on_change: called with a port, slots (int64 [n]) and their values [n, ...] before the arrays change, for the
    followers of a tensor-parallel group.
    """

    def __init__(self, spec: NodeSpec, ports: LoopPorts, slots: Slots, dtype: torch.dtype, most_items: int) -> None:
        self.ports = ports
        self.feeds = Feeds(slots.count, most_items) if ports.feed is not None else None
        self._node = spec.name
        self._slots = slots
        self._inputs = {name: keyword(name) for name in (*(into for into, _ in ports.states), *ports.constants)}
        self.arrays: dict[str, Tensor] = {}
        for port in self._inputs.values():
            kind = spec.port(port)
            shape = (slots.count + 1, *(int(size) for size in kind.shape))
            self.arrays[port] = torch.zeros(shape, dtype=DTYPES.get(kind.dtype, dtype), device=slots.device)
        self._random_port = keyword(RANDOM)
        self._random_shape = tuple(int(size) for size in spec.port(self._random_port).shape) if ports.random else ()
        self._random_name = crc32(f"{spec.name}{RANDOM}".encode())
        self._moved: dict[str, dict[int, Tensor]] = {}
        self.on_change: Callable[[str, np.ndarray, Tensor], None] | None = None
        # Padding keeps the zeros of the spare row, as a stopped sequence keeps its state.
        slots.device_stopped[slots.spare] = True

    # -- one sequence ------------------------------------------------------------------------------------------------

    def begin(self, slot: int, values: Mapping[str, Tensor]) -> None:
        """Set the rows of a slot. values: by input as the walk names it. Raises EngineError for a wrong shape."""
        for name, port in self._inputs.items():
            value, array = values[name], self.arrays[port]
            if value.numel() != prod(array.shape[1:]):
                raise EngineError(
                    f"input {port!r} of node {self._node} has the wrong shape",
                    f"{list(value.shape)}, declared {list(array.shape[1:])}",
                    node=self._node,
                )
            value = value.reshape(array.shape[1:])
            if value.is_cpu:
                self._moved.setdefault(port, {})[slot] = value.to(array.dtype)
            else:
                self._apply(port, np.array([slot], dtype=np.int64), value.to(array.dtype)[None])

    def state(self, slot: int, port: str) -> Tensor | None:
        """Return a copy of a carried value by the output that gives it; None for another port."""
        for into, out in self.ports.states:
            if out == port:
                self.flush()
                return self.arrays[into][slot].clone()
        return None

    def flush(self) -> None:
        """Copy new rows from the host to the device. Called before a step reads them."""
        for port, rows in self._moved.items():
            self._apply(port, np.array([*rows], dtype=np.int64), torch.stack([*rows.values()]))
        self._moved.clear()

    def _apply(self, port: str, slots: np.ndarray, values: Tensor) -> None:
        if self.on_change is not None:
            self.on_change(port, slots, values)
        self.set(port, slots, values)

    def set(self, port: str, slots: np.ndarray, values: Tensor) -> None:
        """Set the values of a port in these slots (int64 [n]): [n, ...] on host or device, in the array's dtype."""
        array = self.arrays[port]
        array.index_copy_(0, upload(slots, array.device), upload(values, array.device))

    # -- host values of a step ---------------------------------------------------------------------------------------

    def fields(self, count: int) -> Fields:
        """Return the staging fields of so many sequences."""
        found: dict[str, tuple[torch.dtype, int]] = {}
        if self.ports.feed is not None:
            found[port_field(self.ports.feed)] = torch.int64, count
        if self.ports.random:
            found[port_field(self._random_port)] = torch.float32, count * prod(self._random_shape)
        return found

    def random_states(self, slots: np.ndarray) -> np.ndarray:
        """Return the states of the random numbers of these slots, int64 [n]. They change with the requests only."""
        seeds = [rng.to_int64(self._slots.sampling[slot].seed) for slot in slots] if self.ports.random else []
        return rng.named_host(np.array(seeds, dtype=np.int64), self._random_name)

    def values(self, slots: np.ndarray, states: np.ndarray) -> dict[str, np.ndarray]:
        """Return the host values of the next step of these slots. states: their `random_states`."""
        found: dict[str, np.ndarray] = {}
        if self.feeds is not None and self.ports.feed is not None:
            found[port_field(self.ports.feed)] = self.feeds.values(slots)
        if self.ports.random:
            drawn = self._slots.drawn[slots]
            found[port_field(self._random_port)] = rng.uniforms_host(states, drawn, prod(self._random_shape))
        return found

    # -- device values of a step -------------------------------------------------------------------------------------

    def inputs(self, rows: Tensor, host: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the module's ports by keyword, one value per sequence: [n, *shape].

        rows: int64 [n], slots; host: `values` on the device. The feed is int64 [n].
        """
        found = {port: array.index_select(0, rows) for port, array in self.arrays.items()}
        if self.ports.feed is not None:
            found[self.ports.feed] = host[port_field(self.ports.feed)]
        if self.ports.random:
            given = host[port_field(self._random_port)]
            found[self._random_port] = given.view(len(rows), *self._random_shape)
        return found

    def store(self, rows: Tensor, before: Mapping[str, Tensor], outputs: Mapping[str, Tensor], stopped: Tensor) -> None:
        """Replace the state of these rows by the module's outputs. Sequences in `stopped` (bool [n]) keep theirs.

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
            self.arrays[into].index_copy_(0, rows, torch.where(keeps, old, new.reshape(old.shape).to(old.dtype)))
