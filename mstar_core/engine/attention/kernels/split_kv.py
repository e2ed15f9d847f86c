"""Attention of passes without a mask: the keys of a row are shared out, so that few tiles fill the whole chip.

One row of 258 tokens and 16 heads is 80 tiles, each of which would walk alone through up to ten thousand keys on a chip
of 132 processors. Here several programs take a tile's keys by turns and a second kernel joins them; many tiles take all
of their keys themselves. Used by `paged`; on Hopper `frames` takes those of few rows, with this join.

Cost model: a page is walked in whole blocks of keys, one look into the page table and no mask for each, brought by the
tensor copy engine; what a page holds beyond whole blocks is gathered behind them. The last tile of a row costs as much
as any, however few tokens it holds: a smaller kind of tile beside the others made all of them slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from mstar_core.layers.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

PROGRAMS: Final = 396
"""Programs that an H100 holds at a time: three for each of its 132 processors. One more would wait for all others."""

MOST_SHARES: Final = 8

BLOCK: Final = 64
"""Tokens of one tile: a frame of 258 is five of them for each head."""

KEYS: Final = 64
"""Keys of one block."""

STAGES: Final = 3
"""Blocks on their way."""

JOINED: Final = 1024
"""Lanes of one program that joins shares: 16 lines of 64."""


@triton.jit
def _take(q, k, v, known, top, total, mixed, scale, is_masked: tl.constexpr):
    """One block of keys: the new maximum of the scores, sum of weights and sum of weighted values."""
    score = tl.dot(q, k.T)
    if is_masked:
        score = tl.where(known[None, :], score, -1.0e30)
    higher = tl.maximum(top, tl.max(score, axis=1) * scale)
    weight = tl.exp2(score * scale - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    return higher, total, tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None])


@triton.jit
def _share_kernel(
    query, pool, lines, mixed_out, top_out, total_out, tile_row, tile_start, tile_count, tile_cached, tables, scale,
    query_stride, max_pages, kv_heads, groups, all_lines, tiles, shares, page: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, keys: tl.constexpr, stages: tl.constexpr, is_whole: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    heads = kv_heads * groups
    program = tl.program_id(0)
    tile = program % tiles
    head = program // tiles % heads
    share = program // (tiles * heads)
    count = tl.load(tile_count + tile)
    row = tl.load(tile_row + tile)
    first = tl.load(tile_start + tile).to(tl.int64)
    # A spare row has no keys: every share of it is empty, and the join makes zeros of that.
    end = tl.where(row < 0, 0, tl.load(tile_cached + tile) + count)
    table = tables + tl.maximum(row, 0) * max_pages
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    per: tl.constexpr = page // keys
    rest: tl.constexpr = page % keys
    whole = end // page
    blocks = whole * per + tl.cdiv(end - whole * per * keys, keys)
    begin = share * blocks // shares
    stop = (share + 1) * blocks // shares
    token = tl.arange(0, block)
    at = tl.arange(0, width)
    inside = token < count
    load = query + (first + token[:, None]) * query_stride + head * width + at[None, :]
    q = tl.load(load, mask=inside[:, None], other=0.0)
    top = tl.full((block,), -1.0e30, tl.float32)
    total = tl.zeros((block,), tl.float32)
    mixed = tl.zeros((block, width), tl.float32)
    key = tl.arange(0, keys)
    column = head // groups * width
    if per > 0:
        last = tl.minimum(stop, whole * per)
        number = tl.load(table + begin // per, mask=begin < last, other=0)
        for at_block in tl.range(begin, last, num_stages=stages):
            start = number * (2 * page) + (at_block % per) * keys
            k = lines.load([start, column])
            v = lines.load([start + page, column])
            number = tl.load(table + (at_block + 1) // per, mask=at_block + 1 < last, other=0)
            top, total, mixed = _take(q, k, v, key < keys, top, total, mixed, scale, False)
    # What is left over of whole pages, and the last page where it is not whole.
    own = pool + column
    line = kv_heads * width
    for left in tl.range(tl.maximum(begin, whole * per), stop, num_stages=2 if per == 0 else 1):
        place = (left - whole * per) * keys + key
        known = place < end - whole * per * keys
        of = tl.zeros((keys,), tl.int32) + whole
        if rest > 0:
            of = tl.minimum(place // rest, whole)
        within = place - of * rest + tl.where(of < whole, per * keys, 0)
        offset = (tl.load(table + of, mask=known, other=0).to(tl.int64) * (2 * page) + within) * line
        k_left = tl.load(own + offset[:, None] + at[None, :], mask=known[:, None], other=0.0)
        v_left = tl.load(own + offset[:, None] + page * line + at[None, :], mask=known[:, None], other=0.0)
        top, total, mixed = _take(q, k_left, v_left, known, top, total, mixed, scale, True)
    mine = share.to(tl.int64) * all_lines + (first + token) * heads + head
    made = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    into = mixed_out + mine[:, None] * width + at[None, :]
    tl.store(into, made.to(mixed_out.dtype.element_ty), mask=inside[:, None])
    if not is_whole:
        tl.store(top_out + mine, top, mask=inside)
        tl.store(total_out + mine, total, mask=inside)


@triton.jit
def _join_kernel(
    mixed_in, top_in, total_in, out, all_lines, width: tl.constexpr, shares: tl.constexpr, some: tl.constexpr,
    overlaps: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) * some + tl.arange(0, some)
    at = tl.arange(0, width)
    inside = line < all_lines
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    highest = tl.full((some,), -1.0e30, tl.float32)
    for share in tl.static_range(shares):
        highest = tl.maximum(highest, tl.load(top_in + share * all_lines + line, mask=inside, other=-1.0e30))
    total = tl.zeros((some,), tl.float32)
    mixed = tl.zeros((some, width), tl.float32)
    for share in tl.static_range(shares):
        slot = share * all_lines + line
        weight = tl.exp2(tl.load(top_in + slot, mask=inside, other=-1.0e30) - highest)
        weight *= tl.load(total_in + slot, mask=inside, other=0.0)
        part = tl.load(mixed_in + slot[:, None] * width + at[None, :], mask=inside[:, None], other=0.0)
        total += weight
        mixed += weight[:, None] * part.to(tl.float32)
    made = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + line[:, None] * width + at[None, :], made.to(out.dtype.element_ty), mask=inside[:, None])


def shares_of(tiles: int, heads: int) -> int:
    """By how many programs each tile's keys are taken: as many as run at once; 1: the tiles do by themselves."""
    return min(MOST_SHARES, max(1, PROGRAMS // (tiles * heads)))


def blocks_of(pool: Tensor) -> TensorDescriptor:
    """What the copy engine takes blocks of keys and values of a pool by."""
    pages, halves, page, kv_heads, width = pool.shape
    return TensorDescriptor.from_tensor(pool.view(pages * halves * page, kv_heads * width), [KEYS, width])


def attend_shared(
    query: Tensor, pool: Tensor, blocks: TensorDescriptor, fields: dict[str, Tensor], factor: float,
    *, max_pages: int, shares: int,
) -> Tensor:  # fmt: skip
    """Attention without a mask among a row's tokens.

    query: [T, heads, width], the last two dimensions contiguous; pool: as `make_pools` makes it, blocks: of it; fields:
    row, start, count, cached int32 [tiles] and tables int32 [rows * max_pages], as `PagedFixedPasses` fills them;
    factor: the scale times log2(e). Returns [T, heads, width] in the query's dtype.
    """
    count, heads, width = query.shape
    kv_heads, page, all_lines, tiles = pool.shape[3], pool.shape[2], count * heads, len(fields["row"])
    out = torch.empty((count, heads, width), dtype=query.dtype, device=query.device)
    mixed, top, total = shared(out, shares)
    _share_kernel[(tiles * heads * shares,)](
        query, pool, blocks, mixed, top, total, fields["row"], fields["start"], fields["count"], fields["cached"],
        fields["tables"], factor, query.stride(0), max_pages, kv_heads, heads // kv_heads, all_lines, tiles, shares,
        page=page, width=width, block=BLOCK, keys=KEYS, stages=STAGES, is_whole=shares == 1, num_warps=4,
        **launch_options(query.device),
    )  # fmt: skip
    if shares > 1:
        join(mixed, top, total, out)
    return out


def shared(out: Tensor, shares: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the shares of `out` [T, heads, width] go: [shares, T * heads, width], maxima and sums [shares, T * heads].

    The maxima and sums are float32. With one share nothing is joined, and it goes into `out` itself.
    """
    if shares == 1:
        return out, out, out
    lines, width = out.shape[0] * out.shape[1], out.shape[2]
    mixed = torch.empty((shares, lines, width), dtype=out.dtype, device=out.device)
    top, total = torch.empty((2, shares, lines), dtype=torch.float32, device=out.device).unbind()
    return mixed, top, total


def join(mixed: Tensor, top: Tensor, total: Tensor, out: Tensor) -> None:
    """Sum shares, each by its weight, into out. Shapes as `shared` makes them."""
    shares, lines, width = mixed.shape
    some = max(1, JOINED // width)
    _join_kernel[(triton.cdiv(lines, some),)](
        mixed, top, total, out, lines, width=width, shares=shares, some=some, num_warps=4, **launch_options(out.device),
    )  # fmt: skip
