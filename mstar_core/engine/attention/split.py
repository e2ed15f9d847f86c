"""Attention of passes with few rows: the keys of a row are shared out, so that few tiles fill the whole chip.

One row of 258 tokens and 16 heads is 80 tiles, each of which would walk alone through up to ten thousand keys on a chip
of 132 processors. Here several programs take a tile's keys by turns and a second kernel joins them. Used by `paged`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

PROGRAMS: Final = 528
"""Programs that fill one H100: four for each of its 132 processors."""

MOST_SHARES: Final = 8


@triton.jit
def _share_kernel(
    query, pool, mixed_out, top_out, total_out, tile_row, tile_start, tile_count, tile_cached, tables, scale,
    query_stride, max_pages, kv_heads, groups, page: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    keys: tl.constexpr, shares: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    share = tl.program_id(2)
    count = tl.load(tile_count + tile)
    row = tl.load(tile_row + tile)
    first = tl.load(tile_start + tile).to(tl.int64)
    end = tl.load(tile_cached + tile) + count
    # A spare row has no keys: every share of it is empty, and the join makes zeros of that.
    end = tl.where(row < 0, 0, end)
    row = tl.maximum(row, 0)
    each = tl.cdiv(tl.cdiv(end, keys), shares) * keys
    begin = share * each
    stop = tl.minimum(begin + each, end)
    token = tl.arange(0, block)
    at = tl.arange(0, width)
    inside = token < count
    load = query + (first + token[:, None]) * query_stride + head * width + at[None, :]
    q = tl.load(load, mask=inside[:, None], other=0.0)
    top = tl.full((block,), -1.0e30, tl.float32)
    total = tl.zeros((block,), tl.float32)
    mixed = tl.zeros((block, width), tl.float32)
    line = kv_heads * width
    own = pool + (head // groups) * width
    for start in range(begin, stop, keys):
        place = start + tl.arange(0, keys)
        known = place < stop
        number = tl.load(tables + row * max_pages + place // page, mask=known, other=0).to(tl.int64)
        offset = (number * (2 * page) + place % page) * line
        k = tl.load(own + offset[None, :] + at[:, None], mask=known[None, :], other=0.0)
        score = tl.where(known[None, :], tl.dot(q, k) * scale, -1.0e30)
        higher = tl.maximum(top, tl.max(score, axis=1))
        part = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(part, axis=1)
        v = tl.load(own + offset[:, None] + page * line + at[None, :], mask=known[:, None], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(part.to(v.dtype), v)
        top = higher
    heads = tl.num_programs(1)
    slot = ((tile.to(tl.int64) * heads + head) * shares + share) * block
    tl.store(mixed_out + (slot + token[:, None]) * width + at[None, :], mixed)
    tl.store(top_out + slot + token, top)
    tl.store(total_out + slot + token, total)


@triton.jit
def _join_kernel(
    mixed_in, top_in, total_in, out, tile_start, tile_count, out_stride,
    width: tl.constexpr, block: tl.constexpr, shares: tl.constexpr, some: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.program_id(2) * some + tl.arange(0, some)
    at = tl.arange(0, width)
    heads = tl.num_programs(1)
    base = (tile.to(tl.int64) * heads + head) * shares * block
    highest = tl.full((some,), -1.0e30, tl.float32)
    for share in tl.static_range(shares):
        highest = tl.maximum(highest, tl.load(top_in + base + share * block + token))
    total = tl.zeros((some,), tl.float32)
    mixed = tl.zeros((some, width), tl.float32)
    for share in tl.static_range(shares):
        slot = base + share * block + token
        weight = tl.exp2(tl.load(top_in + slot) - highest)
        total += weight * tl.load(total_in + slot)
        mixed += weight[:, None] * tl.load(mixed_in + slot[:, None] * width + at[None, :])
    made = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    first = tl.load(tile_start + tile).to(tl.int64)
    inside = token < tl.load(tile_count + tile)
    store = out + (first + token[:, None]) * out_stride + head * width + at[None, :]
    tl.store(store, made.to(out.dtype.element_ty), mask=inside[:, None])


def shares_of(tiles: int, heads: int) -> int:
    """By how many programs each tile's keys are taken: as many as fill the chip; 1: the tiles do by themselves."""
    return min(MOST_SHARES, max(1, PROGRAMS // (tiles * heads)))


def attend_shared(
    query: Tensor, pool: Tensor, fields: dict[str, Tensor], factor: float, page_size: int, max_pages: int,
    *, block: int, keys: int, shares: int,
) -> Tensor:  # fmt: skip
    """Attention without a mask among a row's tokens.

    query: [T, heads, width], the last two dimensions contiguous; pool: as `make_pools` makes it; fields: row, start,
    count, cached int32 [tiles] and tables int32 [rows * max_pages], as `PagedFixedPasses` fills them; factor: the
    scale times log2(e). Returns [T, heads, width] in the query's dtype.
    """
    tokens, heads, width = query.shape
    tiles, device = len(fields["row"]), query.device
    mixed = torch.empty((tiles, heads, shares, block, width), dtype=torch.float32, device=device)
    top, total = torch.empty((2, tiles, heads, shares, block), dtype=torch.float32, device=device)
    out = torch.empty((tokens, heads, width), dtype=query.dtype, device=device)
    _share_kernel[(tiles, heads, shares)](
        query, pool, mixed, top, total, fields["row"], fields["start"], fields["count"], fields["cached"],
        fields["tables"], factor, query.stride(0), max_pages, pool.shape[3], heads // pool.shape[3],
        page=page_size, width=width, block=block, keys=keys, shares=shares, num_warps=4, num_stages=2,
    )  # fmt: skip
    some = 16
    _join_kernel[(tiles, heads, block // some)](
        mixed, top, total, out, fields["start"], fields["count"], out.stride(0),
        width=width, block=block, shares=shares, some=some, num_warps=4,
    )  # fmt: skip
    return out
