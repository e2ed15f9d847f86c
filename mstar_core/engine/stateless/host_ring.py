"""Pinned memory in which the outputs of a step reach the host. Used by the stateless engine.

Pinned memory is slow to get and its allocation may wait for the device, so that a few buffers serve in turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

BUFFERS: Final = 3
"""Two steps in flight and one whose results are being taken."""
LEAST_BYTES: Final = 1 << 19
"""Of a buffer from the start, so that the usual step never has to get any."""


class HostRing:
    """Buffers of one port, used in turn. Owned by the engine. They grow to the largest step and stay."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(LEAST_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
        self._turn = 0

    def copy(self, value: Tensor) -> Tensor:
        """Start copying a CUDA tensor on the current stream. The result is valid after that, for two more copies."""
        self._turn = (self._turn + 1) % BUFFERS
        count = value.numel() * value.element_size()
        if self._buffers[self._turn].numel() < count:
            size = 1 << (count - 1).bit_length()
            self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        target = self._buffers[self._turn][:count].view(value.dtype).view(value.shape)
        target.copy_(value, non_blocking=True)
        return target
