"""Rotary position embedding in time, height and width, as V-JEPA 2 was trained with it. Used by every stack of blocks.

The angles are laid out for half-split rotary and the lanes are swapped as for interleaved rotary. The weights were
trained with this mismatch: both lanes of a pair have different angles, so norms change and only absolute positions
work.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

BASE: Final = 10000.0

Rotation = tuple["Tensor", "Tensor"]
"""Cosine and sine of every rotated lane, float32 [..., T, 1, 3 * lanes]; the 1 is the head axis. On CUDA they cover all
lanes, with angle 0 for those that are not rotated.
"""


def lanes_per_axis(head_dim: int) -> int:
    """Return the lanes of a head that each of time, row and column rotates. The remaining lanes are not rotated."""
    return 2 * (head_dim // 3 // 2)


class Rotary3D(nn.Module):
    """Angles of tokens, with float32 frequencies in any model dtype."""

    frequencies: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        half = lanes_per_axis(head_dim) // 2
        self.head_dim = head_dim
        exponent = torch.arange(half, dtype=torch.float32) / half
        self.register_buffer("frequencies", 1.0 / BASE**exponent, persistent=False)

    def forward(self, time: Tensor, row: Tensor, column: Tensor) -> Rotation:
        """Return the rotation of tokens. time, row, column: whole numbers [..., T]."""
        if time.is_cuda:
            kernels = importlib.import_module("mstar_vjepa2.kernels.rotary")
            rotation: Rotation = kernels.angles(time, row, column, self.frequencies.float(), self.head_dim)
            return rotation
        place = torch.stack([time, row, column], dim=-1).float()
        angles = place[..., None] * self.frequencies.float()
        both = torch.cat([angles, angles], dim=-1).flatten(-2)[..., None, :]
        return both.cos(), both.sin()

    def of_ids(self, ids: Tensor, rows: int, columns: int) -> Rotation:
        """Return the rotation of patch ids, numbered frame by frame, row by row. ids: int64 [..., T]; rows, columns: of
        a frame.
        """
        size = rows * columns
        within = ids % size
        return self.forward(ids // size, within // columns, within % columns)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first lanes of heads in float32. x: [..., T, heads, head_dim], which is overwritten on CUDA.

    Returns x's shape and dtype; on CUDA this is x itself.
    """
    if x.is_cuda and is_taken(x, rotation[0]):
        turned: Tensor = importlib.import_module("mstar_vjepa2.kernels.rotary").rotate(x, *rotation)
        return turned
    return rotate_plain(x, rotation)


def is_taken(x: Tensor, cosine: Tensor) -> bool:
    """Whether the kernel supports this layout: evenly strided tokens, contiguous heads, angles shared by leading axes
    only.
    """
    even = all(x.stride(axis) == x.shape[axis + 1] * x.stride(axis + 1) for axis in range(x.dim() - 3))
    tokens = x.shape[:-2]
    shared = cosine.shape[:-2] == tokens[len(tokens) - (cosine.dim() - 2) :]
    return even and x.stride(-1) == 1 and x.shape[-1] % 2 == 0 and shared and cosine.is_contiguous()


def rotate_plain(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate in plain torch operations: the CPU path and the kernel's reference."""
    cosine, sine = rotation
    width = cosine.shape[-1]
    lanes = x[..., :width].float()
    first, second = lanes.unflatten(-1, (-1, 2)).unbind(-1)
    swapped = torch.stack([-second, first], dim=-1).flatten(-2)
    turned = (lanes * cosine + swapped * sine).to(x.dtype)
    rest = x[..., width:]
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
