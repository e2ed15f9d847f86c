"""Attention of passes that only read, in fixed shapes: flow steps over a cached prefix. For captured passes on CUDA.

The keys of a pass are those of its row's pages and, behind them, its own, which are read where the projections left
them: nothing is gathered, folded or copied. Few rows make few tiles, so their keys are shared out among programs and a
second kernel joins what they found. Where that makes few programs even with one block of keys for each, they read what
the cache has of it while the projections in front still run; others are taken by `folded` on Hopper. Sums have a fixed
order: the same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.engine.attention.block import Block
from mstar_core.engine.attention.kernels.tile_heuristics import FOLDED, HELD_FOLDED, HELD_KEYS, Folds
from mstar_core.engine.attention.passes import LOG2E, NOTHING
from mstar_core.layers.kernels.gluon import gluon_kernels
from mstar_core.layers.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.block import Fields, Values
    from mstar_core.engine.attention.passes import PassShape

Given: TypeAlias = "tuple[Tensor, Tensor, Tensor]"
"""Query [T, heads, width], key and value [T, kv_heads, width]; the last two dimensions of each are contiguous."""

KEYS: Final = 64
"""Keys of one pass of the inner loop."""

JOINED: Final = 4
"""Lines of one program that joins shares."""


@triton.jit
def _read_kernel(
    query, key, value, pool, out, mixed_out, top_out, total_out, ends, tables, scale,
    query_stride, key_stride, value_stride, tokens, max_pages, kv_heads, lines,
    page: tl.constexpr, width: tl.constexpr, groups: tl.constexpr, block: tl.constexpr, keys: tl.constexpr,
    is_whole: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(1)
    row = tl.program_id(2) // kv_heads
    kv_head = tl.program_id(2) % kv_heads
    folded = tl.program_id(0) * block + tl.arange(0, block)
    inside = folded < tokens * groups
    at = tl.arange(0, width)
    token = row * tokens + folded // groups
    head = kv_head * groups + folded % groups
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    end = tl.load(ends + row)
    count = end + tokens
    each = tl.cdiv(tl.cdiv(count, keys), tl.num_programs(1)) * keys
    begin = share * each
    stop = tl.minimum(begin + each, count)
    load = query + token.to(tl.int64)[:, None] * query_stride + (head * width)[:, None] + at[None, :]
    q = tl.load(load, mask=inside[:, None], other=0.0)
    top = tl.full((block,), -1.0e30, tl.float32)
    total = tl.zeros((block,), tl.float32)
    mixed = tl.zeros((block, width), tl.float32)
    line = kv_heads * width
    cached = pool + kv_head * width
    for start in range(begin, stop, keys):
        place = start + tl.arange(0, keys)
        known = place < stop
        is_cached = place < end
        number = tl.load(tables + row * max_pages + place // page, mask=is_cached, other=0).to(tl.int64)
        offset = (number * (2 * page) + place % page) * line
        # What is not in the pages is the pass's own, at its number behind them.
        mine = (row * tokens + place - end).to(tl.int64)
        k_at = tl.where(is_cached, cached + offset, key + kv_head * width + mine * key_stride)
        k = tl.load(k_at[None, :] + at[:, None], mask=known[None, :], other=0.0)
        score = tl.where(known[None, :], tl.dot(q, k) * scale, -1.0e30)
        higher = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        v_at = tl.where(is_cached, cached + offset + page * line, value + kv_head * width + mine * value_stride)
        v = tl.load(v_at[:, None] + at[None, :], mask=known[:, None], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
        top = higher
    own = token.to(tl.int64) * (kv_heads * groups) + head
    if is_whole:
        store = out + own[:, None] * width + at[None, :]
        tl.store(store, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    else:
        own += share.to(tl.int64) * lines
        tl.store(mixed_out + own[:, None] * width + at[None, :], mixed, mask=inside[:, None])
        tl.store(top_out + own, top, mask=inside)
        tl.store(total_out + own, total, mask=inside)


@triton.jit
def _hold_kernel(
    query, key, value, pool, mixed_out, top_out, total_out, ends, tables, scale,
    query_stride, key_stride, value_stride, tokens, max_pages, kv_heads, lines,
    page: tl.constexpr, width: tl.constexpr, groups: tl.constexpr, block: tl.constexpr, keys: tl.constexpr,
    overlaps: tl.constexpr,
):  # fmt: skip
    """A share of one block of keys: what the cache has of it is here before the queries are."""
    share = tl.program_id(1)
    row = tl.program_id(2) // kv_heads
    kv_head = tl.program_id(2) % kv_heads
    if overlaps:
        gdc_launch_dependents()
    end = tl.load(ends + row)
    place = share * keys + tl.arange(0, keys)
    at = tl.arange(0, width)
    is_cached = place < end
    number = tl.load(tables + row * max_pages + place // page, mask=is_cached, other=0).to(tl.int64)
    line = kv_heads * width
    cached = pool + kv_head * width + (number * (2 * page) + place % page) * line
    k = tl.load(cached[None, :] + at[:, None], mask=is_cached[None, :], other=0.0)
    v = tl.load((cached + page * line)[:, None] + at[None, :], mask=is_cached[:, None], other=0.0)
    if overlaps:
        gdc_wait()
    folded = tl.program_id(0) * block + tl.arange(0, block)
    inside = folded < tokens * groups
    token = row * tokens + folded // groups
    head = kv_head * groups + folded % groups
    load = query + (token * query_stride + head * width)[:, None] + at[None, :]
    q = tl.load(load, mask=inside[:, None], other=0.0)
    known = place < end + tokens
    if (share + 1) * keys > end:
        # What is not in the pages is the pass's own, at its number behind them; what was read of it is zero.
        mine = known & (place >= end)
        own_at = row * tokens + place - end
        k += tl.load(
            key + kv_head * width + (own_at * key_stride)[None, :] + at[:, None], mask=mine[None, :], other=0.0
        )
        v += tl.load(
            value + kv_head * width + (own_at * value_stride)[:, None] + at[None, :], mask=mine[:, None], other=0.0
        )
    score = tl.where(known[None, :], tl.dot(q, k) * scale, -1.0e30)
    top = tl.max(score, axis=1)
    # A share behind the last key has nothing but such scores, of which no difference may be taken.
    weight = tl.where(known[None, :], tl.exp2(score - top[:, None]), 0.0)
    mixed = tl.dot(weight.to(v.dtype), v)
    own = share.to(tl.int64) * lines + token * (kv_heads * groups) + head
    tl.store(mixed_out + own[:, None] * width + at[None, :], mixed, mask=inside[:, None])
    tl.store(top_out + own, top, mask=inside)
    tl.store(total_out + own, tl.sum(weight, axis=1), mask=inside)


@triton.jit
def _join_kernel(
    mixed_in, top_in, total_in, out, lines, shares, width: tl.constexpr, block: tl.constexpr, overlaps: tl.constexpr
):
    line = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = line < lines
    at = tl.arange(0, width)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    highest = tl.full((block,), -1.0e30, tl.float32)
    for share in range(0, shares):
        highest = tl.maximum(highest, tl.load(top_in + share * lines + line, mask=inside, other=-1.0e30))
    total = tl.zeros((block,), tl.float32)
    mixed = tl.zeros((block, width), tl.float32)
    for share in range(0, shares):
        own = share * lines + line
        weight = tl.exp2(tl.load(top_in + own, mask=inside, other=-1.0e30) - highest)
        total += weight * tl.load(total_in + own, mask=inside, other=1.0)
        mixed += weight[:, None] * tl.load(mixed_in + own[:, None] * width + at[None, :], mask=inside[:, None], other=0)
    store = out + line[:, None] * width + at[None, :]
    tl.store(store, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _gather_kernel(
    mixed_in, top_in, total_in, out, lines, shares, width: tl.constexpr, most: tl.constexpr, overlaps: tl.constexpr
):
    """The same for few shares: one line, all of whose shares are asked for at once."""
    line = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, most)
    at = tl.arange(0, width)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    own = share * lines + line
    known = share < shares
    top = tl.load(top_in + own, mask=known, other=-1.0e30)
    total = tl.load(total_in + own, mask=known, other=0.0)
    mixed = tl.load(mixed_in + own[:, None] * width + at[None, :], mask=known[:, None], other=0.0)
    weight = tl.exp2(top - tl.max(top, axis=0))
    made = tl.sum(weight[:, None] * mixed, axis=0) / tl.sum(weight * total, axis=0)
    tl.store(out + line * width + at, made.to(out.dtype.element_ty))


class PagedFixedReads:
    """Attention of one bucket of passes that read: every token sees all of its row's cache and of its own pass."""

    def __init__(self, pools: list[Tensor], page_size: int, shape: PassShape, beside: Fields = NOTHING) -> None:
        self._pools = pools
        self._page_size = page_size
        self._shape = shape
        fields = {"ends": (torch.int32, shape.rows), "tables": (torch.int32, shape.rows * shape.pages)}
        self._block = Block({**fields, **beside}, pools[0].device)
        self._folded: dict[int, object] = {}

    @property
    def device(self) -> Mapping[str, Tensor]:
        """See FixedPasses."""
        return self._block.device

    @property
    def view(self) -> PagedFixedReads:
        """See FixedPasses: this object."""
        return self

    def forget(self) -> None:
        """See FixedPasses: nothing is kept."""

    def prepare(self, rows: np.ndarray, cached: np.ndarray, tables: np.ndarray, beside: Values = NOTHING) -> None:
        """See FixedPasses. A row that is nobody's has nothing in its cache and sees its own tokens."""
        own = tables[rows, : self._shape.pages]
        self._block.send({**beside, "ends": cached, "tables": own})

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView. The last two dimensions of each are contiguous."""
        pool, shape = self._pools[layer], self._shape
        width, given, folds = query.shape[2], (query, key, value), Folds.of(query, pool, shape)
        factor = (width**-0.5 if scale is None else scale) * LOG2E
        if folds.held is not None:
            return self._held(given, pool, factor, (*folds.held, folds.each))
        folded = (
            gluon_kernels("mstar_core.engine.attention.kernels.gqa_packed", "flow steps of several requests")
            if query.is_cuda
            else None
        )
        if folded is None or not folded.takes(query, pool):
            return self._read(given, pool, factor, (*folds.shared, folds.each))
        if layer not in self._folded:
            self._folded[layer] = folded.blocks_of(pool)
        found: Tensor = folded.attend(given, pool, self._folded[layer], self._block.device, factor, shape)
        return found

    def _held(self, given: Given, pool: Tensor, factor: float, grid: tuple[int, int, int]) -> Tensor:
        """By a program for every tile and block of keys. grid: tiles, blocks, rows times key heads."""
        query = given[0]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        mixed, top, total = _found(grid[1], out)
        _hold_kernel[grid](
            *given, pool, mixed, top, total, *self._sizes(given, pool, factor), block=HELD_FOLDED, keys=HELD_KEYS,
            **self._options(query, pool),
        )  # fmt: skip
        return _gathered(mixed, top, total, out)

    def _read(self, given: Given, pool: Tensor, factor: float, grid: tuple[int, int, int]) -> Tensor:
        """By as many programs as fill the chip. grid: tiles, shares of keys, rows times key heads."""
        query, shares = given[0], grid[1]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        mixed, top, total = _found(shares, out) if shares > 1 else (out, out, out)
        _read_kernel[grid](
            *given, pool, out, mixed, top, total, *self._sizes(given, pool, factor), block=FOLDED, keys=KEYS,
            is_whole=shares == 1, num_stages=2, **self._options(query, pool),
        )  # fmt: skip
        return out if shares == 1 else _joined(mixed, top, total, out)

    def _sizes(self, given: Given, pool: Tensor, factor: float) -> tuple[Any, ...]:
        """What both kernels take behind where they write."""
        fields, shape, query = self._block.device, self._shape, given[0]
        strides = (each.stride(0) for each in given)
        return (
            fields["ends"], fields["tables"], factor, *strides, shape.tokens, shape.pages, pool.shape[3],
            query.shape[0] * query.shape[1],
        )  # fmt: skip

    def _options(self, query: Tensor, pool: Tensor) -> dict[str, int]:
        """And how both are built."""
        groups, width = query.shape[1] // pool.shape[3], query.shape[2]
        return {
            "page": self._page_size,
            "width": width,
            "groups": groups,
            "num_warps": 8,
            **launch_options(query.device),
        }


def _found(shares: int, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what each share finds: sums [S, lines, width], highest scores and totals [S, lines], float32."""
    lines, width = out.shape[0] * out.shape[1], out.shape[2]
    mixed = torch.empty((shares, lines, width), dtype=torch.float32, device=out.device)
    top, total = torch.empty((2, shares, lines), dtype=torch.float32, device=out.device).unbind()
    return mixed, top, total


def _gathered(mixed: Tensor, top: Tensor, total: Tensor, out: Tensor) -> Tensor:
    """`out`, of few shares of few lines."""
    shares, lines, width = mixed.shape
    _gather_kernel[(lines,)](
        mixed, top, total, out, lines, shares, width=width, most=triton.next_power_of_2(shares), num_warps=2,
        **launch_options(out.device),
    )  # fmt: skip
    return out


def _joined(mixed: Tensor, top: Tensor, total: Tensor, out: Tensor) -> Tensor:
    """`out`, of any number of either."""
    shares, lines, width = mixed.shape
    _join_kernel[(triton.cdiv(lines, JOINED),)](
        mixed, top, total, out, lines, shares, width=width, block=JOINED, num_warps=4, **launch_options(out.device)
    )
    return out
