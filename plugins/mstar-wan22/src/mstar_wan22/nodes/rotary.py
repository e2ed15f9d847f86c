"""Rotary positions of a video: frame, row and column. Used by the transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

BASE: Final = 10000.0


def parts(head_dim: int) -> tuple[int, int, int]:
    """Return the values of a head that turn with frame, row and column: 44, 42 and 42 of 128."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def angles(grid: tuple[int, int, int], head_dim: int, device: torch.device) -> Tensor:
    """Return the angles of all tokens, float64 [tokens, head_dim / 2]. grid: frames, rows and columns of tokens."""
    columns = []
    for axis, width in enumerate(parts(head_dim)):
        speeds = BASE ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
        turned = torch.arange(grid[axis], dtype=torch.float64, device=device)[:, None] * speeds
        shape = [1, 1, 1, turned.shape[1]]
        shape[axis] = grid[axis]
        columns.append(turned.view(shape).expand(*grid, -1))
    return torch.cat(columns, dim=-1).flatten(0, 2)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn adjacent pairs of values. x: [B, tokens, heads, head_dim]; tables: float32 [tokens, head_dim / 2]."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cosines[:, None], sines[:, None]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2).to(x.dtype)
