"""What a captured step reads beside its pages and large inputs: small arrays that go to the device in one copy.

Used by the graphs of passes and by the attention in them. Cost model: a copy costs the host some 20 µs however little
it brings, so that all that a replay needs of the host is laid into one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

Fields = Mapping[str, tuple[torch.dtype, int]]
"""Arrays side by side: name -> (dtype, length)."""

Values = Mapping[str, np.ndarray]
"""What goes into them from the start on, in row-major order."""


class Block:
    """Small arrays side by side on a device, brought there by one copy.

    Each copy leaves from pinned memory of its own, which torch's allocator keeps until the copy has read it: loops
    that are launched without waiting would overtake any ring.
    """

    def __init__(self, fields: Fields, device: torch.device) -> None:
        self._spans: dict[str, tuple[int, int, np.dtype]] = {}
        size = 0
        for name, (dtype, length) in fields.items():
            count = dtype.itemsize * length
            self._spans[name] = size, size + count, _numpy_kind(dtype)
            size += -(-count // 16) * 16
        self._block = torch.zeros(size, dtype=torch.uint8, device=device)
        self.device = {name: self._block[slice(*self._spans[name][:2])].view(fields[name][0]) for name in fields}

    def send(self, values: Values) -> None:
        """Copy values to the device; fields are padded with zeros, those that are not named become zero."""
        assert values.keys() <= self._spans.keys(), "a value without a field would be lost"
        host = torch.empty(len(self._block), dtype=torch.uint8, pin_memory=self._block.is_cuda)
        flat = host.numpy()
        for name, (start, end, kind) in self._spans.items():
            into, given, count = flat[start:end].view(kind), values.get(name), 0
            if given is not None:
                count = given.size
                into[:count] = given if given.ndim == 1 else given.reshape(-1)
            into[count:] = 0
        self._block.copy_(host, non_blocking=True)


def port_field(name: str) -> str:
    """The field of a module's port, whatever the fields of attention are called."""
    return f"port {name}"


def host_array(value: Tensor) -> np.ndarray:
    """A host tensor as a block takes it: numpy knows no bfloat16, whose 16 bits travel."""
    found: np.ndarray = (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy()
    return found


def _numpy_kind(dtype: torch.dtype) -> np.dtype:
    return host_array(torch.empty(0, dtype=dtype)).dtype
