"""Inputs of a stateless node: the inputs of jobs become the ports of one batch. Used by the stateless engine."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.transfers import upload
from mstar_core.graph.declare.nodes import PortType, keyword

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.module import NodeModule
    from mstar_core.graph.declare.nodes import NodeSpec

SMALL: Final = 65536
"""Elements of the largest input that stays on the host until its batch is copied to the GPU as a whole."""

Number = float | int | bool


class BatchPorts:
    """Ports of one node. Host ports become numpy arrays, the others tensors on the device. Owned by the engine.

    Cost model: one key per job; one array per batch and port. Numbers of host ports never become tensors.
    """

    def __init__(self, spec: NodeSpec, module: NodeModule, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._is_free = {
            name: PortType.parse(text).dtype in ("any", "bf16", "f16") for name, text in spec.ports.items()
        }
        self._host_words: frozenset[str] = frozenset(module.host_ports)
        self._listed: frozenset[str] = frozenset(module.listed_ports)
        self._words: dict[str, tuple[str, bool]] = {}

    def word(self, name: str) -> str:
        """Return the keyword of a port in the module's forward."""
        return self._of(name)[0]

    def is_host(self, name: str) -> bool:
        """Return whether the module takes this port on the host."""
        return self._of(name)[1]

    def _is_open(self, name: str) -> bool:
        named = self._spec.batch_key
        return name in self._spec.ragged or (bool(named) and name not in named)

    def _of(self, name: str) -> tuple[str, bool]:
        """Return the keyword, and whether it is a host port. Cached: called for every input of every job."""
        entry = self._words.get(name)
        if entry is None:
            word = keyword(name)
            entry = self._words[name] = (word, word in self._host_words)
        return entry

    def is_sent(self, name: str, value: Tensor | Number) -> bool:
        """Return whether an input is copied to the device when its job is submitted."""
        if not isinstance(value, torch.Tensor) or value.is_cuda or self.is_host(name):
            return False
        return value.numel() > SMALL

    def taken(self, name: str, value: Tensor | Number) -> Tensor | Number:
        """Return a job's input as it is queued: on the device in the node's dtype, or small and on the host."""
        if self.is_host(name):
            return value.cpu() if isinstance(value, torch.Tensor) and value.is_cuda else value
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(value)
        is_free = self._is_free.get(name, True)
        dtype = self._dtype if value.is_floating_point() and is_free else value.dtype
        if not value.is_cuda and value.numel() <= SMALL:
            return value.to(dtype)
        return upload(value, self._device).to(dtype)

    def key(self, ports: Mapping[str, Tensor | Number], split: Container[str] = ()) -> tuple[object, ...]:
        """Return what jobs of one batch must have in common. split: ports with one value per candidate."""
        parts: list[object] = []
        for name, value in ports.items():
            if type(value) is int or type(value) is bool:
                continue
            if self.is_host(name) and _is_number(value):
                parts += [name] if _is_float(value) else []
                continue
            assert isinstance(value, torch.Tensor), "numbers of other ports become tensors when they are taken"
            shape = value.shape[1:] if name in split else value.shape
            parts += (value.dtype, None if self._is_open(name) else shape)
        return tuple(ports), *parts

    def stacked(
        self, name: str, values: Sequence[Tensor | Number], items: Sequence[tuple[int, bool]]
    ) -> Tensor | list[Tensor] | np.ndarray | list[np.ndarray]:
        """Return one port of a batch: [B, ...], or a list of B where shapes differ or the module takes lists.

        items: batch items of each job, and whether its value holds one for each of them.
        """
        if self.is_host(name):
            return _host_array(values, items)
        tensors: list[Tensor] = []
        for value, (count, is_split) in zip(values, items, strict=True):
            assert isinstance(value, torch.Tensor), "numbers become tensors when they are taken"
            tensors.extend(value if is_split else [value] * count)
        is_even = self.word(name) not in self._listed and all(tensor.shape == tensors[0].shape for tensor in tensors)
        if self._device.type == "cpu":
            return _together(tensors) if is_even else tensors
        # Host values are uploaded as one copy: one each would cost more than the step.
        if not is_even or any(tensor.device != tensors[0].device for tensor in tensors):
            tensors = [self.sent(tensor) for tensor in tensors]
        if not is_even:
            return tensors
        return self.sent(_together(tensors))

    def sent(self, value: Tensor) -> Tensor:
        """Return a tensor on the device, without waiting for its copy."""
        return upload(value, self._device)


def _together(items: list[Tensor]) -> Tensor:
    """Stack items. A single one is not copied: it may be a clip, or the frames of hundreds of candidates."""
    return items[0].unsqueeze(0) if len(items) == 1 else torch.stack(items)


def _host_array(values: Sequence[Tensor | Number], items: Sequence[tuple[int, bool]]) -> np.ndarray | list[np.ndarray]:
    counts = [count for count, _ in items]
    if not _is_number(values[0]):
        arrays = [
            np.asarray(each)
            for value, (count, is_split) in zip(values, items, strict=True)
            for each in (value if is_split and isinstance(value, torch.Tensor) else [value] * count)
        ]
        return np.stack(arrays) if all(array.shape == arrays[0].shape for array in arrays) else arrays
    dtype = np.float64 if _is_float(values[0]) else np.int64
    numbers: np.ndarray = np.fromiter(values, dtype=dtype, count=len(values))
    return numbers if max(counts) == 1 else np.repeat(numbers, counts)


def is_on_gpu(value: Tensor | Number) -> bool:
    """Return whether a value is a CUDA tensor."""
    return isinstance(value, torch.Tensor) and value.is_cuda


def _is_number(value: Tensor | Number) -> bool:
    return not isinstance(value, torch.Tensor) or not value.dim()


def _is_float(value: Tensor | Number) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)
