"""Tile heuristics: kernel, tiles and KV splits of prefix attention, and tiles of packed prompts. Arithmetic only.

Queries are GQA-packed: the tokens of a sequence times the query heads of one KV head share one tile, because they
attend to the same keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape

PROGRAMS: Final = 132
"""Programs that fill an H100: one per multiprocessor, with 160 KiB of shared memory or more."""

MAX_SPLITS: Final = 16

QUERIES: Final = 64
"""Queries per tile of the split-KV kernel, which supports every page size and device."""

SINGLE_QUERIES: Final = 32
"""Queries per tile of the single-block kernel, where every program has one block of keys."""

SINGLE_KEYS: Final = 128
"""Keys per block of that kernel: with their values 128 KiB, loaded while the projections before still run."""

HOPPER_QUERIES: Final = 128
"""Queries per program on Hopper: 64, the rows of a wgmma instruction, for each of two warp groups."""

HOPPER_KEYS: Final = 64
"""Keys per block on Hopper. With a head dimension of 256, keys and values of a block are 64 KiB."""

HOPPER_SPLITS: Final = 8
"""Most KV splits on Hopper: two blocks each at nine hundred keys, and half as much to combine as with 16."""

HOPPER_WIDTHS: Final = (64, 128, 256)
"""Supported head dimensions on Hopper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedQueries:
    """GQA-packed queries of one pass. count: per sequence and KV head. groups: sequences times KV heads.

    max_keys: most cached and new keys of a sequence.
    """

    count: int
    groups: int
    max_keys: int

    @classmethod
    def of(cls, query: Tensor, pool: Tensor, shape: AttentionShape) -> PackedQueries:
        """Derive the counts. query: [T, heads, width]; pool: see `make_pools`."""
        page, kv_heads = pool.shape[2:4]
        return cls(
            count=shape.tokens * (query.shape[1] // kv_heads),
            groups=shape.sequences * kv_heads,
            max_keys=shape.pages * page + shape.tokens,
        )

    @property
    def single_block(self) -> tuple[int, int] | None:
        """Tiles and blocks of keys, if one program per tile and block fits the device at once; else None."""
        tiles, blocks = -(-self.count // SINGLE_QUERIES), -(-self.max_keys // SINGLE_KEYS)
        return (tiles, blocks) if tiles * blocks * self.groups <= PROGRAMS else None

    @property
    def split_kv(self) -> tuple[int, int]:
        """Tiles and KV splits of the kernel for every page size and device."""
        tiles = -(-self.count // QUERIES)
        return tiles, max(1, min(MAX_SPLITS, -(-PROGRAMS // (tiles * self.groups))))

    @property
    def hopper(self) -> tuple[int, int]:
        """Tiles and KV splits on Hopper: all programs run at once, and each has a block of a full sequence."""
        tiles = -(-self.count // HOPPER_QUERIES)
        blocks = -(-self.max_keys // HOPPER_KEYS)
        return tiles, max(1, min(HOPPER_SPLITS, PROGRAMS // (tiles * self.groups), blocks))


def fits_hopper(query: Tensor, pool: Tensor) -> bool:
    """Return whether the Hopper kernel supports these queries and this pool: half precision, pages of whole blocks."""
    page, width = pool.shape[2], pool.shape[4]
    is_half = query.dtype == pool.dtype and query.dtype in (torch.bfloat16, torch.float16)
    return is_half and width in HOPPER_WIDTHS and page % HOPPER_KEYS == 0 and pool.is_contiguous()


def tiles_of(prompts: AttentionMetadata, tokens: int, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split packed prompts, and the unused rest of a bucket of `tokens`, into tiles of up to `block` tokens.

    Returns per tile: the index of its prompt (the number of prompts for the rest), its first token within the prompt,
    and its tokens.
    """
    counts = np.append(prompts.counts, tokens - prompts.query_starts[-1])
    tiles = -(-counts // block)
    of = np.repeat(np.arange(len(counts)), tiles)
    within = (np.arange(len(of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * block
    return of, within, np.minimum(counts[of] - within, block)
