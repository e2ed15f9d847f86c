"""8-bit pixels to the values that image encoders read. Source: the specification, section 7."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


class SignedPixels(nn.Module):
    """Pixels to [-1, 1], by a table: a division on a device may round otherwise than the reference does.

    Images travel to the device as bytes, a quarter of the memory of their values.
    """

    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        half = np.float32(0.5)
        values = (np.arange(256, dtype=np.float32) / np.float32(255) - half) / half
        self.register_buffer("values", torch.tensor(values), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        """Return values of image's shape. image: uint8, or values, which are returned as they are."""
        return image if image.is_floating_point() else self.values[image.long()]
