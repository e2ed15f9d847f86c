"""By which kernels and how many programs a pass that only reads is attended. Arithmetic alone: used by `reading`.

Queries are folded: the tokens of a row times the query heads of one key head, which all see the same keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.passes import PassShape

PROGRAMS: Final = 132
"""Programs that fill an H100: one of 160 KiB of shared memory or more for each of its processors."""

MOST_SHARES: Final = 16

FOLDED: Final = 64
"""Queries of one tile of the kernel for any page and device."""

HELD_FOLDED: Final = 32
"""Queries of one tile where every program has one block of keys."""

HELD_KEYS: Final = 128
"""Keys of that block: with their values 128 KiB, which arrive while the projections in front still run."""

HOPPER_FOLDED: Final = 128
"""Queries of a program on Hopper: 64, the rows of a tensor-core instruction, for each of two groups of warps."""

HOPPER_KEYS: Final = 64
"""Keys of a block there. At 256 lanes a block and its values are 64 KiB."""

HOPPER_SHARES: Final = 8
"""Programs that share a tile's keys there at most: two blocks each at nine hundred keys, and half as much to join."""

HOPPER_WIDTHS: Final = (64, 128, 256)
"""Lanes of a head there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folds:
    """The folded queries of one pass. count: of each row and key head. each: rows times key heads.

    most_keys: that a row can hold and bring.
    """

    count: int
    each: int
    most_keys: int

    @classmethod
    def of(cls, query: Tensor, pool: Tensor, shape: PassShape) -> Folds:
        """query: [T, heads, width]; pool: as `make_pools` makes it."""
        page, kv_heads = pool.shape[2:4]
        return cls(
            count=shape.tokens * (query.shape[1] // kv_heads), each=shape.rows * kv_heads,
            most_keys=shape.pages * page + shape.tokens,
        )  # fmt: skip

    @property
    def held(self) -> tuple[int, int] | None:
        """Tiles and blocks of keys, where there is a program for each tile's every block; else None."""
        tiles, blocks = -(-self.count // HELD_FOLDED), -(-self.most_keys // HELD_KEYS)
        return (tiles, blocks) if tiles * blocks * self.each <= PROGRAMS else None

    @property
    def shared(self) -> tuple[int, int]:
        """Tiles, and by how many programs each one's keys are taken, by the kernel for any page and device."""
        tiles = -(-self.count // FOLDED)
        return tiles, max(1, min(MOST_SHARES, -(-PROGRAMS // (tiles * self.each))))

    @property
    def hopper(self) -> tuple[int, int]:
        """The same on Hopper: as many as run at once, none of them without a block of a row that is full."""
        tiles = -(-self.count // HOPPER_FOLDED)
        blocks = -(-self.most_keys // HOPPER_KEYS)
        return tiles, max(1, min(HOPPER_SHARES, PROGRAMS // (tiles * self.each), blocks))


def fits_hopper(query: Tensor, pool: Tensor) -> bool:
    """Whether the kernel for Hopper takes such queries and such a pool: half precision, pages of whole blocks."""
    page, width = pool.shape[2], pool.shape[4]
    is_half = query.dtype == pool.dtype and query.dtype in (torch.bfloat16, torch.float16)
    return is_half and width in HOPPER_WIDTHS and page % HOPPER_KEYS == 0 and pool.is_contiguous()
