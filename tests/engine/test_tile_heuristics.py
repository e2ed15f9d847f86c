"""Tile heuristics of prefix attention: kernel, tiles and KV splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar_core.engine.attention.kernels.tile_heuristics import PROGRAMS, PackedQueries, fits_hopper, tiles_of
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape


def packed(rows: int, tokens: int = 50, *, heads: int = 8, kv_heads: int = 1, page: int = 64) -> PackedQueries:
    query, pool = torch.empty(rows * tokens, heads, 256), torch.empty(1, 2, page, kv_heads, 256)
    return PackedQueries.of(
        query, pool, AttentionShape(sequences=rows, tokens=tokens, pages=1024 // page, writes=False)
    )


@pytest.mark.parametrize("page", [16, 64, 128])
def test_only_small_passes_use_the_single_block_kernel(page: int) -> None:
    """One request of fifty tokens uses it, and so do several of ten."""
    assert packed(1, page=page).single_block == (13, 9)
    assert packed(2, page=page).single_block is None
    assert packed(4, 10, page=page).single_block == (3, 9) and packed(5, 10, page=page).single_block is None
    assert packed(1, heads=16, kv_heads=2, page=page).single_block is None


@pytest.mark.parametrize("tokens", [1, 10, 50, 70, 200])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16, 64])
def test_programs_on_hopper_run_at_once_and_all_have_keys(rows: int, tokens: int) -> None:
    found = packed(rows, tokens)
    tiles, splits = found.hopper
    programs = tiles * splits * rows
    assert tiles * 128 >= tokens * 8 > (tiles - 1) * 128
    assert 1 <= splits <= min(8, -(-found.max_keys // 64))
    assert splits == 1 or programs <= PROGRAMS
    assert splits == 8 or splits * 64 >= found.max_keys or tiles * (splits + 1) * rows > PROGRAMS, (
        "one more split would fit"
    )


def test_splits_of_several_requests() -> None:
    assert [packed(rows).hopper for rows in (2, 4, 5, 6, 8, 16, 33, 40)] == [
        (4, 8),
        (4, 8),
        (4, 6),
        (4, 5),
        (4, 4),
        (4, 2),
        (4, 1),
        (4, 1),
    ]
    assert [packed(rows).split_kv for rows in (2, 4, 8, 40)] == [(7, 10), (7, 5), (7, 3), (7, 1)]


def test_hopper_needs_half_precision_and_pages_of_full_blocks() -> None:
    def fits(
        page: int = 64, width: int = 256, dtype: torch.dtype = torch.bfloat16, cache: torch.dtype | None = None
    ) -> bool:
        return fits_hopper(
            torch.empty(50, 8, width, dtype=dtype), torch.empty(1, 2, page, 1, width, dtype=cache or dtype)
        )

    assert fits() and fits(page=128) and fits(width=128) and fits(width=64) and fits(dtype=torch.float16)
    assert not fits(page=16) and not fits(page=96) and not fits(width=96) and not fits(dtype=torch.float32)
    assert not fits(cache=torch.float16)
    layered = torch.empty(1, 2, 64, 2, 256, dtype=torch.bfloat16)[:, :, :, :1]
    assert not fits_hopper(torch.empty(50, 8, 256, dtype=torch.bfloat16), layered)


@pytest.mark.parametrize("counts", [(), (1,), (16,), (17, 3), (40, 16, 1), (64,)])
def test_tiles_cover_prompts_and_the_rest_of_the_bucket(counts: tuple[int, ...]) -> None:
    rows = np.arange(len(counts))
    tables = np.zeros((4, 8), dtype=np.int32)
    prompts = AttentionMetadata.of(rows, rows * 0, tables, np.array(counts, dtype=np.int64))
    expected = [
        (prompt, first, min(16, count - first))
        for prompt, count in enumerate((*counts, 64 - sum(counts)))
        for first in range(0, count, 16)
    ]
    assert [tuple(tile) for tile in np.stack(tiles_of(prompts, 64, 16), axis=1).tolist()] == expected
