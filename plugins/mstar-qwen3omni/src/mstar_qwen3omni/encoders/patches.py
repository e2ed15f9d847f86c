"""Vision patches: their values and order, the resampling of learned positions, and rotary angles.

Source: specification section 6. Used by the vision encoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from mstar_qwen3omni.checkpoint.config import PATCH_FRAMES

if TYPE_CHECKING:
    from torch import Tensor

ROPE_BASE: Final = 10_000.0


def patches_of_image(image: Tensor, side: int, merge: int) -> Tensor:
    """Return the patches of an image, as those of a pair of equal frames, [p, values], in the order of their blocks.

    image: [3, y, x], multiples of side * merge. Values: channel, frame, row and column.
    """
    rows, columns = image.shape[1] // (side * merge), image.shape[2] // (side * merge)
    blocks = image.view(3, rows, merge, side, columns, merge, side).permute(1, 4, 2, 5, 0, 3, 6)
    pairs = blocks[..., None, :, :].expand(-1, -1, -1, -1, -1, PATCH_FRAMES, -1, -1)
    return pairs.reshape(rows * columns * merge**2, -1)


def patch_places(height: int, width: int, merge: int) -> tuple[Tensor, Tensor]:
    """Return row and column of the patches of a frame, int64 [height * width] each, in the order of their blocks.

    A block of merge x merge patches becomes one token; blocks follow row by row, and the patches in a block likewise.
    """
    rows = torch.arange(height)[:, None].expand(height, width)
    columns = torch.arange(width)[None].expand(height, width)
    blocks = [
        axis.reshape(height // merge, merge, width // merge, merge).transpose(1, 2).flatten()
        for axis in (rows, columns)
    ]
    return blocks[0], blocks[1]


def places_of(height: int, width: int, merge: int, side: int) -> Tensor:
    """Return per patch its row, its column, and both on the table of learned positions: float32 [patches, 4].

    side: rows and columns of the table. The first and last patch lie on its first and last entry.
    """
    row, column = patch_places(height, width, merge)
    on_table = [torch.linspace(0, side - 1, count)[place] for count, place in ((height, row), (width, column))]
    return torch.stack([row.float(), column.float(), *on_table], dim=1)


def resampled(table: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Interpolate a square table bilinearly: [..., width]. table: [side * side, width]; row, column: float32 [...]."""
    side = round(len(table) ** 0.5)
    top, left = row.long(), column.long()
    bottom, right = (top + 1).clamp(max=side - 1), (left + 1).clamp(max=side - 1)
    down, across = row - top, column - left
    corners = (
        (top, left, (1 - down) * (1 - across)),
        (top, right, (1 - down) * across),
        (bottom, left, down * (1 - across)),
        (bottom, right, down * across),
    )
    total = torch.zeros((), dtype=torch.float32, device=table.device)
    for y, x, share in corners:
        total = total + table[y * side + x].float() * share[..., None]
    return total.to(table.dtype)


def rotation_of(row: Tensor, column: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine per patch, float32 [..., 1, head_dim]. row, column: float32 [...].

    A quarter of a head's dimensions turns with the row and a quarter with the column; both repeat in the second half.
    """
    step = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=row.device) / (head_dim // 2)
    frequency = ROPE_BASE**-step
    angle = torch.cat([row[..., None] * frequency, column[..., None] * frequency], dim=-1)
    both = torch.cat([angle, angle], dim=-1)[..., None, :]
    return both.cos(), both.sin()
