"""Prefix attention: passes that attend to a cached prefix and to their own tokens without appending.

Flow steps are such passes. Used by captured passes on CUDA, in fixed shapes. Keys of the prefix are read from the pages
and new keys from the projections' output, without a copy. Few sequences give few tiles, so several programs split a
sequence's keys and a second kernel combines their results. If all tiles and key blocks fit the device at once, each
program has one block and loads its cached part while the projections before still run. Otherwise `gqa_packed` runs on
Hopper, and a split-KV kernel on other devices. Sums have a fixed order, so equal inputs give equal bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.engine.attention.kernels.tile_heuristics import QUERIES, SINGLE_KEYS, SINGLE_QUERIES, PackedQueries
from mstar_core.engine.attention.static import LOG2E, StaticAttention
from mstar_core.layers.kernels.gluon import gluon_kernels
from mstar_core.layers.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.staging import Fields, Values
    from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape

QueryKeyValue: TypeAlias = "tuple[Tensor, Tensor, Tensor]"
"""Query [T, heads, width], key and value [T, kv_heads, width]; the last two dimensions of each are contiguous."""

KEYS: Final = 64
"""Keys per iteration of the inner loop."""

GQA_PACKED: Final = "mstar_core.engine.attention.kernels.gqa_packed"

COMBINED: Final = 4
"""Lines per program that combines splits."""


@triton.jit
def _prefix_kernel(
    query,
    key,
    value,
    pool,
    out,
    mixed_out,
    top_out,
    total_out,
    ends,
    tables,
    scale,
    query_stride,
    key_stride,
    value_stride,
    tokens,
    max_pages,
    kv_heads,
    lines,
    page: tl.constexpr,
    width: tl.constexpr,
    groups: tl.constexpr,
    block: tl.constexpr,
    keys: tl.constexpr,
    is_whole: tl.constexpr,
    overlaps: tl.constexpr,
):
    split = tl.program_id(1)
    sequence = tl.program_id(2) // kv_heads
    kv_head = tl.program_id(2) % kv_heads
    query_at = tl.program_id(0) * block + tl.arange(0, block)
    inside = query_at < tokens * groups
    at = tl.arange(0, width)
    token = sequence * tokens + query_at // groups
    head = kv_head * groups + query_at % groups
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    end = tl.load(ends + sequence)
    count = end + tokens
    share = tl.cdiv(tl.cdiv(count, keys), tl.num_programs(1)) * keys
    begin = split * share
    stop = tl.minimum(begin + share, count)
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
        number = tl.load(tables + sequence * max_pages + place // page, mask=is_cached, other=0).to(tl.int64)
        offset = (number * (2 * page) + place % page) * line
        # New keys follow the cached ones.
        mine = (sequence * tokens + place - end).to(tl.int64)
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
    slot = token.to(tl.int64) * (kv_heads * groups) + head
    if is_whole:
        store = out + slot[:, None] * width + at[None, :]
        tl.store(store, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    else:
        slot += split.to(tl.int64) * lines
        tl.store(mixed_out + slot[:, None] * width + at[None, :], mixed, mask=inside[:, None])
        tl.store(top_out + slot, top, mask=inside)
        tl.store(total_out + slot, total, mask=inside)


@triton.jit
def _prefix_single_block_kernel(
    query,
    key,
    value,
    pool,
    mixed_out,
    top_out,
    total_out,
    ends,
    tables,
    scale,
    query_stride,
    key_stride,
    value_stride,
    tokens,
    max_pages,
    kv_heads,
    lines,
    page: tl.constexpr,
    width: tl.constexpr,
    groups: tl.constexpr,
    block: tl.constexpr,
    keys: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Attend to one block of keys, whose cached part is loaded before the queries are ready."""
    split = tl.program_id(1)
    sequence = tl.program_id(2) // kv_heads
    kv_head = tl.program_id(2) % kv_heads
    if overlaps:
        gdc_launch_dependents()
    end = tl.load(ends + sequence)
    place = split * keys + tl.arange(0, keys)
    at = tl.arange(0, width)
    is_cached = place < end
    number = tl.load(tables + sequence * max_pages + place // page, mask=is_cached, other=0).to(tl.int64)
    line = kv_heads * width
    cached = pool + kv_head * width + (number * (2 * page) + place % page) * line
    k = tl.load(cached[None, :] + at[:, None], mask=is_cached[None, :], other=0.0)
    v = tl.load((cached + page * line)[:, None] + at[None, :], mask=is_cached[:, None], other=0.0)
    if overlaps:
        gdc_wait()
    query_at = tl.program_id(0) * block + tl.arange(0, block)
    inside = query_at < tokens * groups
    token = sequence * tokens + query_at // groups
    head = kv_head * groups + query_at % groups
    load = query + (token * query_stride + head * width)[:, None] + at[None, :]
    q = tl.load(load, mask=inside[:, None], other=0.0)
    known = place < end + tokens
    if (split + 1) * keys > end:
        # New keys follow the cached ones. The loads above gave zeros for them.
        mine = known & (place >= end)
        own_at = sequence * tokens + place - end
        k += tl.load(
            key + kv_head * width + (own_at * key_stride)[None, :] + at[:, None], mask=mine[None, :], other=0.0
        )
        v += tl.load(
            value + kv_head * width + (own_at * value_stride)[:, None] + at[None, :], mask=mine[:, None], other=0.0
        )
    score = tl.where(known[None, :], tl.dot(q, k) * scale, -1.0e30)
    top = tl.max(score, axis=1)
    # A block after the last key has only masked scores. Without this mask their weights would be 1.
    weight = tl.where(known[None, :], tl.exp2(score - top[:, None]), 0.0)
    mixed = tl.dot(weight.to(v.dtype), v)
    slot = split.to(tl.int64) * lines + token * (kv_heads * groups) + head
    tl.store(mixed_out + slot[:, None] * width + at[None, :], mixed, mask=inside[:, None])
    tl.store(top_out + slot, top, mask=inside)
    tl.store(total_out + slot, tl.sum(weight, axis=1), mask=inside)


@triton.jit
def _combine_kernel(
    mixed_in, top_in, total_in, out, lines, splits, width: tl.constexpr, block: tl.constexpr, overlaps: tl.constexpr
):
    line = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = line < lines
    at = tl.arange(0, width)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    highest = tl.full((block,), -1.0e30, tl.float32)
    for split in range(0, splits):
        highest = tl.maximum(highest, tl.load(top_in + split * lines + line, mask=inside, other=-1.0e30))
    total = tl.zeros((block,), tl.float32)
    mixed = tl.zeros((block, width), tl.float32)
    for split in range(0, splits):
        slot = split * lines + line
        weight = tl.exp2(tl.load(top_in + slot, mask=inside, other=-1.0e30) - highest)
        total += weight * tl.load(total_in + slot, mask=inside, other=1.0)
        mixed += weight[:, None] * tl.load(
            mixed_in + slot[:, None] * width + at[None, :], mask=inside[:, None], other=0
        )
    store = out + line[:, None] * width + at[None, :]
    tl.store(store, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _combine_few_kernel(
    mixed_in, top_in, total_in, out, lines, splits, width: tl.constexpr, most: tl.constexpr, overlaps: tl.constexpr
):
    """Combine few splits: one line per program, with all splits loaded at once."""
    line = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, most)
    at = tl.arange(0, width)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    slot = split * lines + line
    known = split < splits
    top = tl.load(top_in + slot, mask=known, other=-1.0e30)
    total = tl.load(total_in + slot, mask=known, other=0.0)
    mixed = tl.load(mixed_in + slot[:, None] * width + at[None, :], mask=known[:, None], other=0.0)
    weight = tl.exp2(top - tl.max(top, axis=0))
    output = tl.sum(weight[:, None] * mixed, axis=0) / tl.sum(weight * total, axis=0)
    tl.store(out + line * width + at, output.to(out.dtype.element_ty))


class PagedPrefixAttention(StaticAttention):
    """Prefix attention of one bucket: each token attends to the cache of its sequence and to all tokens of its pass."""

    def __init__(self, pools: list[Tensor], page_size: int, shape: AttentionShape) -> None:
        super().__init__(pools, page_size, shape)
        self._descriptors: dict[int, object] = {}

    @property
    def fields(self) -> Fields:
        """See StaticAttention. ends: cached tokens of each sequence."""
        shape = self._shape
        return {"ends": (torch.int32, shape.sequences), "tables": (torch.int32, shape.sequences * shape.pages)}

    def values(self, metadata: AttentionMetadata) -> Values:
        """See StaticAttention. An unused sequence has no cached keys and attends to its own tokens."""
        return {"ends": metadata.lengths, "tables": metadata.tables[metadata.page_rows, : self._shape.pages]}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView. The last two dimensions of each are contiguous."""
        pool, shape = self._pools[layer], self._shape
        width, tensors, queries = query.shape[2], (query, key, value), PackedQueries.of(query, pool, shape)
        factor = (width**-0.5 if scale is None else scale) * LOG2E
        if queries.single_block is not None:
            return self._attend_single_block(tensors, pool, factor, (*queries.single_block, queries.groups))
        hopper = gluon_kernels(GQA_PACKED, "flow steps of several requests") if query.is_cuda else None
        if hopper is None or not hopper.supports(query, pool):
            return self._attend_split_kv(tensors, pool, factor, (*queries.split_kv, queries.groups))
        if layer not in self._descriptors:
            self._descriptors[layer] = hopper.descriptor_of(pool)
        out: Tensor = hopper.attend(tensors, pool, self._descriptors[layer], self._device, factor, shape)
        return out

    def _attend_single_block(
        self, tensors: QueryKeyValue, pool: Tensor, factor: float, grid: tuple[int, int, int]
    ) -> Tensor:
        """Attend with one program per tile and block of keys. grid: tiles, blocks, sequences times KV heads."""
        query = tensors[0]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        mixed, top, total = _split_outputs(grid[1], out)
        _prefix_single_block_kernel[grid](
            *tensors,
            pool,
            mixed,
            top,
            total,
            *self._sizes(tensors, pool, factor),
            block=SINGLE_QUERIES,
            keys=SINGLE_KEYS,
            **self._options(query, pool),
        )
        return _combine_few(mixed, top, total, out)

    def _attend_split_kv(
        self, tensors: QueryKeyValue, pool: Tensor, factor: float, grid: tuple[int, int, int]
    ) -> Tensor:
        """Attend with enough KV splits to fill the device. grid: tiles, splits, sequences times KV heads."""
        query, splits = tensors[0], grid[1]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        mixed, top, total = _split_outputs(splits, out) if splits > 1 else (out, out, out)
        _prefix_kernel[grid](
            *tensors,
            pool,
            out,
            mixed,
            top,
            total,
            *self._sizes(tensors, pool, factor),
            block=QUERIES,
            keys=KEYS,
            is_whole=splits == 1,
            num_stages=2,
            **self._options(query, pool),
        )
        return out if splits == 1 else _combine(mixed, top, total, out)

    def _sizes(self, tensors: QueryKeyValue, pool: Tensor, factor: float) -> tuple[Any, ...]:
        """Return the arguments of both kernels after their outputs."""
        fields, shape, query = self._device, self._shape, tensors[0]
        strides = (each.stride(0) for each in tensors)
        return (
            fields["ends"],
            fields["tables"],
            factor,
            *strides,
            shape.tokens,
            shape.pages,
            pool.shape[3],
            query.shape[0] * query.shape[1],
        )

    def _options(self, query: Tensor, pool: Tensor) -> dict[str, int]:
        """Return the compile-time arguments of both kernels."""
        sizes = {"page": self._page_size, "width": query.shape[2], "groups": query.shape[1] // pool.shape[3]}
        return {**sizes, "num_warps": 8, **launch_options(query.device)}


def _split_outputs(splits: int, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate float32 results of each split: weighted sums [S, lines, width], maxima and totals [S, lines]."""
    lines, width = out.shape[0] * out.shape[1], out.shape[2]
    mixed = torch.empty((splits, lines, width), dtype=torch.float32, device=out.device)
    top, total = torch.empty((2, splits, lines), dtype=torch.float32, device=out.device).unbind()
    return mixed, top, total


def _combine_few(mixed: Tensor, top: Tensor, total: Tensor, out: Tensor) -> Tensor:
    """Combine few splits of few lines into `out`."""
    splits, lines, width = mixed.shape
    _combine_few_kernel[(lines,)](
        mixed,
        top,
        total,
        out,
        lines,
        splits,
        width=width,
        most=triton.next_power_of_2(splits),
        num_warps=2,
        **launch_options(out.device),
    )
    return out


def _combine(mixed: Tensor, top: Tensor, total: Tensor, out: Tensor) -> Tensor:
    """Combine any number of splits and lines into `out`."""
    splits, lines, width = mixed.shape
    _combine_kernel[(triton.cdiv(lines, COMBINED),)](
        mixed, top, total, out, lines, splits, width=width, block=COMBINED, num_warps=4, **launch_options(out.device)
    )
    return out
