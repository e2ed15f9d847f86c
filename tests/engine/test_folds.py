"""By which kernels and how many programs a pass that only reads is attended."""

from __future__ import annotations

import pytest
import torch

from mstar_core.engine.attention.kernels.tile_heuristics import PROGRAMS, Folds, fits_hopper
from mstar_core.engine.attention.passes import PassShape


def folds(rows: int, tokens: int = 50, *, heads: int = 8, kv_heads: int = 1, page: int = 64) -> Folds:
    query, pool = torch.empty(rows * tokens, heads, 256), torch.empty(1, 2, page, kv_heads, 256)
    return Folds.of(query, pool, PassShape(rows=rows, tokens=tokens, pages=1024 // page, writes=False))


@pytest.mark.parametrize("page", [16, 64, 128])
def test_only_few_programs_hold_their_keys(page: int) -> None:
    """One request of fifty tokens does, and so do several of ten."""
    assert folds(1, page=page).held == (13, 9)
    assert folds(2, page=page).held is None
    assert folds(4, 10, page=page).held == (3, 9) and folds(5, 10, page=page).held is None
    assert folds(1, heads=16, kv_heads=2, page=page).held is None


@pytest.mark.parametrize("tokens", [1, 10, 50, 70, 200])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16, 64])
def test_programs_on_hopper_run_at_once_and_all_have_keys(rows: int, tokens: int) -> None:
    found = folds(rows, tokens)
    tiles, shares = found.hopper
    programs = tiles * shares * rows
    assert tiles * 128 >= tokens * 8 > (tiles - 1) * 128
    assert 1 <= shares <= min(8, -(-found.most_keys // 64))
    assert shares == 1 or programs <= PROGRAMS
    assert shares == 8 or shares * 64 >= found.most_keys or tiles * (shares + 1) * rows > PROGRAMS, "room is left"


def test_shares_of_requests_that_flow_together() -> None:
    assert [folds(rows).hopper for rows in (2, 4, 5, 6, 8, 16, 33, 40)] == [
        (4, 8), (4, 8), (4, 6), (4, 5), (4, 4), (4, 2), (4, 1), (4, 1)
    ]  # fmt: skip
    assert [folds(rows).shared for rows in (2, 4, 8, 40)] == [(7, 10), (7, 5), (7, 3), (7, 1)]


def test_pages_of_whole_blocks_in_half_precision_fit_hopper() -> None:
    def fits(
        page: int = 64, width: int = 256, dtype: torch.dtype = torch.bfloat16, kept: torch.dtype | None = None
    ) -> bool:
        return fits_hopper(
            torch.empty(50, 8, width, dtype=dtype), torch.empty(1, 2, page, 1, width, dtype=kept or dtype)
        )

    assert fits() and fits(page=128) and fits(width=128) and fits(width=64) and fits(dtype=torch.float16)
    assert not fits(page=16) and not fits(page=96) and not fits(width=96) and not fits(dtype=torch.float32)
    assert not fits(kept=torch.float16)
    layered = torch.empty(1, 2, 64, 2, 256, dtype=torch.bfloat16)[:, :, :, :1]
    assert not fits_hopper(torch.empty(50, 8, 256, dtype=torch.bfloat16), layered)
