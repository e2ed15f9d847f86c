"""How the inputs of a stateless node's jobs become the ports of one batch. Used by the stateless engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.ports import keyword
from mstar_core.errors import EngineError
from mstar_core.graph.nodes import PortType

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_core.graph.nodes import NodeSpec

SMALL: Final = 65536
"""Elements up to which an input stays on the host until its batch travels to a GPU together."""

Number = float | int | bool


class BatchPorts:
    """Owned by the engine of one node. Host ports become numpy arrays, the others tensors on the device.

    Cost model: once per job a key; once per batch and port one array. Numbers of host ports never become tensors.
    """

    def __init__(self, spec: NodeSpec, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._is_free = {
            name: PortType.parse(text).dtype in ("any", "bf16", "f16") for name, text in spec.ports.items()
        }
        self._host_words: frozenset[str] = frozenset(getattr(module, "host_ports", ()))
        self._words: dict[str, tuple[str, bool]] = {}

    def word(self, name: str) -> str:
        """The keyword under which the module gets a port."""
        return self._of(name)[0]

    def is_host(self, name: str) -> bool:
        """Whether the module wants this port on the host."""
        return self._of(name)[1]

    def _is_open(self, name: str) -> bool:
        named = self._spec.batch_key
        return bool(named) and name not in named

    def _of(self, name: str) -> tuple[str, bool]:
        """Keyword, and whether it is a host port; looked up for every input of every job."""
        found = self._words.get(name)
        if found is None:
            word = keyword(name)
            found = self._words[name] = (word, word in self._host_words)
        return found

    def taken(self, name: str, value: Tensor | Number) -> Tensor | Number:
        """A job's input as it waits in the queue: on the device in the node's dtype, or small and on the host."""
        if self.is_host(name):
            return value.cpu() if isinstance(value, torch.Tensor) and value.is_cuda else value
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(value)
        is_free = self._is_free.get(name, True)
        dtype = self._dtype if value.is_floating_point() and is_free else value.dtype
        if not value.is_cuda and value.numel() <= SMALL:
            return value.to(dtype)
        return value.to(self._device, dtype)

    def key(self, ports: Mapping[str, Tensor | Number], axis: int) -> tuple[object, ...]:
        """What jobs must agree in to share a batch. axis: 1 when the first dimension is a job's own rows."""
        parts: list[object] = []
        for name, value in ports.items():
            if type(value) is int or type(value) is bool:
                continue
            if self.is_host(name) and _is_number(value):
                parts += [name] if _is_float(value) else []
                continue
            assert isinstance(value, torch.Tensor), "numbers of other ports become tensors when they are taken"
            shape = value.shape[axis:] if axis else value.shape
            parts += (value.dtype, None if self._is_open(name) else shape)
        return tuple(ports), *parts

    def stacked(
        self, name: str, values: Sequence[Tensor | Number], rows: Sequence[int]
    ) -> Tensor | list[Tensor] | np.ndarray:
        """One port of a batch: [B, ...], or a list of B where shapes differ. rows: batch rows of each job."""
        if self.is_host(name):
            return _host_array(name, values, rows, self._spec.name)
        tensors: list[Tensor] = []
        for value, count in zip(values, rows, strict=True):
            assert isinstance(value, torch.Tensor), "numbers become tensors when they are taken"
            if count == 1:
                tensors.append(value)
            else:
                tensors.extend(value.expand(count) if not value.dim() else value)
        is_even = all(row.shape == tensors[0].shape for row in tensors)
        if self._device.type == "cpu":
            return torch.stack(tensors) if is_even else tensors
        # Rows that are on the host travel together: a copy each would cost more than the step.
        if not is_even or any(row.device != tensors[0].device for row in tensors):
            tensors = [row.to(self._device) for row in tensors]
        if not is_even:
            return tensors
        return self.sent(torch.stack(tensors))

    def sent(self, value: Tensor) -> Tensor:
        """A tensor on the device; the host does not wait for its copy."""
        if value.device.type == self._device.type:
            return value
        return value.pin_memory().to(self._device, non_blocking=True)


def _host_array(name: str, values: Sequence[Tensor | Number], rows: Sequence[int], node: str) -> np.ndarray:
    if not _is_number(values[0]):
        arrays = [value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value) for value in values]
        if any(array.shape != arrays[0].shape for array in arrays):
            raise EngineError(
                f"port {name!r} of node {node} has rows of different shapes",
                f"{sorted({array.shape for array in arrays})}; a port on the host is one array",
                "name the port in the node's batch_key",
                node=node,
            )
        return np.stack(arrays) if max(rows) == 1 else np.concatenate(arrays)
    dtype = np.float64 if _is_float(values[0]) else np.int64
    made: np.ndarray = np.fromiter(values, dtype=dtype, count=len(values))
    return made if max(rows) == 1 else np.repeat(made, rows)


def _is_number(value: Tensor | Number) -> bool:
    return not isinstance(value, torch.Tensor) or not value.dim()


def _is_float(value: Tensor | Number) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)
