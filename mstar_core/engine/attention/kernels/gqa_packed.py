"""GQA-packed prefix attention for Hopper, written in Gluon: flow steps of several requests. Used by `prefix`.

A sequence of 50 tokens with eight query heads per KV head has 400 packed queries, which all attend to the same nine
hundred keys. A program processes 128 of them and a split of the keys, with as many splits as fill the device;
`split_kv` combines the results. A program has three warp groups (warp specialization): two consumers process 64 queries
each, and the producer loads blocks of keys and values into a ring of shared memory. Cached keys do not depend on the
previous kernel, so they are loaded while it still runs; queries and new keys wait for it. Every sum has a fixed order,
so equal inputs give equal bits.

Slots of the ring have a block of keys and one of values of one KV head. `has_k` and `has_v` signal a filled slot;
`free_k` and `free_v` signal that all consumers are done with it. Blocks are counted along the sequence, cached ones
first; block `begin` is a program's first and uses slot 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.engine.attention.kernels.split_kv import combine, split_outputs
from mstar_core.engine.attention.kernels.tile_heuristics import HOPPER_KEYS, PackedQueries, fits_hopper
from mstar_core.layers.kernels.launch import is_hopper

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from mstar_core.engine.steps.attention import AttentionShape

STAGES: Final = 2
"""Blocks in shared memory, beside 64 KiB of queries."""

REGISTERS: Final = (232, 40)
"""Registers per thread of the consumers and of the producer, of 65,536 in all."""

_DTYPES: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def online_softmax(score, top, total, scale, limit, is_masked: gl.constexpr):
    """Run one step of online softmax. Return weights, the factor of former sums, the new maximum and sum of weights."""
    if is_masked:
        key = gl.arange(0, score.shape[1], layout=gl.SliceLayout(0, score.type.layout))
        score = gl.where(key[None, :] < limit, score, -1.0e30)
    higher = gl.maximum(top, gl.max(score, axis=1) * scale)
    weight = gl.exp2(score * scale - higher[:, None])
    shrink = gl.exp2(top - higher)
    return weight, shrink, higher, total * shrink + gl.sum(weight, axis=1)


@gluon.jit
def _copy(into, source, stride, count):
    """Copy `count` lines of a block asynchronously and fill the rest with zeros, because unused memory may contain NaN.

    source: the first line; stride: elements between lines.
    """
    lines: gl.constexpr = into.shape[0]
    width: gl.constexpr = into.shape[1]
    across: gl.constexpr = 32 if width >= 256 else width // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    line = gl.arange(0, lines, layout=gl.SliceLayout(1, layout))
    at = gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    mask = (line < count)[:, None] & (at < width)[None, :]
    async_copy.async_copy_global_to_shared(into, source + line[:, None] * stride + at[None, :], mask=mask)


@gluon.jit
def _wait_for_copies():
    """Wait for this group's copies, and make them visible to the tensor cores' async proxy."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _store_outputs(mixed, top, total, mine_q, out, count, groups: gl.constexpr, is_whole: gl.constexpr):
    """Store the outputs through the queries' shared memory, and maxima and sums if the keys are split.

    out: the three destinations, their first line, the first query, and the lines per token.
    """
    mixed_out, top_out, total_out, mine, first, heads = out
    layout: gl.constexpr = mixed.type.layout
    width: gl.constexpr = mixed.shape[1]
    across: gl.constexpr = 32 if width >= 256 else width // 8
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    output = mixed * (1.0 / gl.where(total > 0.0, total, 1.0))[:, None]
    gl.thread_barrier()
    mine_q.store(output.to(mixed_out.dtype.element_ty))
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    at = gl.arange(0, width, layout=gl.SliceLayout(0, wide))
    line = (first + row) // groups * heads + (first + row) % groups
    into = mixed_out + mine * width + line[:, None] * width + at[None, :]
    gl.store(into, mine_q.load(wide), mask=(row < count)[:, None] & (at < width)[None, :])
    if not is_whole:
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        line = (first + row) // groups * heads + (first + row) % groups
        gl.store(top_out + mine + line, top, mask=row < count)
        gl.store(total_out + mine + line, total, mask=row < count)


@gluon.jit
def _copy_queries(query, mine_q, first, count, stride, groups: gl.constexpr):
    """Copy 64 packed queries from `first` on, zeros beyond `count`. query: first token and head of the sequence."""
    width: gl.constexpr = mine_q.shape[1]
    across: gl.constexpr = 32 if width >= 256 else width // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    at = gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    place = (first + row) // groups * stride + (first + row) % groups * width
    mask = (row < count)[:, None] & (at < width)[None, :]
    async_copy.async_copy_global_to_shared(mine_q, query + place[:, None] + at[None, :], mask=mask)


@gluon.jit
def _consumer(args, part: gl.constexpr, stages: gl.constexpr, groups: gl.constexpr, is_whole: gl.constexpr):
    """Warp group that attends for 64 queries to blocks begin to stop, in sequence.

    The other consumer keeps the tensor cores busy meanwhile.
    """
    query, mixed_out, top_out, total_out, query_stride, mine, first, heads, count = args[0]
    ring_q, ring_k, ring_v, has_k, has_v, free_k, free_v = args[1]
    begin, stop, held, end, tokens, scale = args[2]
    keys: gl.constexpr = ring_k.shape[1]
    width: gl.constexpr = ring_k.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16])
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, keys, 16])
    line: gl.constexpr = gl.SliceLayout(1, scores)
    queries: gl.constexpr = gl.SliceLayout(1, layout)
    weights: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    mine_q = ring_q.index(part)
    first += part * 64
    count -= part * 64
    gdc_wait()
    _copy_queries(query, mine_q, first, count, query_stride, groups)
    _wait_for_copies()
    zero = gl.zeros([64, keys], gl.float32, scores)
    mixed = gl.zeros([64, width], gl.float32, layout)
    top = gl.full([64], -1.0e30, gl.float32, line)
    total = gl.zeros([64], gl.float32, line)
    for i in range(begin, stop):
        slot = (i - begin) % stages
        phase = (i - begin) // stages & 1
        limit = gl.where(i < held, end - i * keys, tokens - (i - held) * keys)
        mbarrier.wait(has_k.index(slot), phase)
        score = warpgroup_mma(mine_q, ring_k.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        mbarrier.arrive(free_k.index(slot), count=1)
        weight, shrink, top, total = online_softmax(score, top, total, scale, limit, True)
        mixed = mixed * gl.convert_layout(shrink, queries)[:, None]
        taken = gl.convert_layout(weight.to(ring_k.dtype), weights)
        mbarrier.wait(has_v.index(slot), phase)
        mixed = warpgroup_mma(taken, ring_v.index(slot), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=(mixed,))
        mbarrier.arrive(free_v.index(slot), count=1)
    out = (mixed_out, top_out, total_out, mine, first, heads)
    top = gl.convert_layout(top, queries)
    _store_outputs(mixed, top, gl.convert_layout(total, queries), mine_q, out, count, groups, is_whole)


@gluon.jit
def _producer(args, page: gl.constexpr, stages: gl.constexpr):
    """Warp group that loads blocks into free slots of the ring.

    Full blocks of the pages are loaded before the previous kernel ends. A partial last block and the new keys are
    copied line by line.
    """
    lines, pool, key, value, key_stride, value_stride, line, column, table = args[0]
    ring_k, ring_v, has_k, has_v, free_k, free_v = args[1]
    begin, middle, stop, held, end, tokens = args[2]
    keys: gl.constexpr = ring_k.shape[1]
    per: gl.constexpr = page // keys
    number = gl.load(table + begin // per, mask=begin < held, other=0)
    for i in range(begin, middle):
        slot = (i - begin) % stages
        phase = (i - begin) // stages & 1 ^ 1
        start = number * (2 * page) + (i % per) * keys
        number = gl.load(table + (i + 1) // per, mask=i + 1 < held, other=0)
        mbarrier.wait(free_k.index(slot), phase)
        mbarrier.expect(has_k.index(slot), lines.block_type.nbytes)
        tma.async_copy_global_to_shared(lines, [start, column], has_k.index(slot), ring_k.index(slot))
        mbarrier.wait(free_v.index(slot), phase)
        mbarrier.expect(has_v.index(slot), lines.block_type.nbytes)
        tma.async_copy_global_to_shared(lines, [start + page, column], has_v.index(slot), ring_v.index(slot))
    for i in range(middle, stop):
        slot = (i - begin) % stages
        phase = (i - begin) // stages & 1 ^ 1
        mbarrier.wait(free_k.index(slot), phase)
        mbarrier.wait(free_v.index(slot), phase)
        # One copy for both kinds of blocks, with a selected source, needs fewer registers.
        is_own = i >= held
        if is_own:
            gdc_wait()
        before = (i - held) * keys
        limit = gl.where(is_own, tokens - before, end - i * keys)
        cached = pool + (number.to(gl.int64) * (2 * page) + (i % per) * keys) * line + column
        k_at = gl.where(is_own, key + before * key_stride, cached)
        v_at = gl.where(is_own, value + before * value_stride, cached + page * line)
        _copy(ring_k.index(slot), k_at, gl.where(is_own, key_stride, line), limit)
        _copy(ring_v.index(slot), v_at, gl.where(is_own, value_stride, line), limit)
        _wait_for_copies()
        mbarrier.arrive(has_k.index(slot), count=1)
        mbarrier.arrive(has_v.index(slot), count=1)


_COUNTS: Final = ("tokens", "max_pages", "kv_heads", "all_lines", "tiles", "splits")
"""Arguments without specialization on 1 or divisibility, so that the kernel is compiled once."""


# racecheck: the partitions get their arguments and their end through shared memory. The compiler orders this by one
# named barrier that warps reach from two places, which the tool does not follow.
@gluon.jit(do_not_specialize=_COUNTS)
def _gqa_packed_kernel(
    query,
    key,
    value,
    pool,
    lines,
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
    all_lines,
    tiles,
    splits,
    page: gl.constexpr,
    groups: gl.constexpr,
    stages: gl.constexpr,
    is_whole: gl.constexpr,
    registers: gl.constexpr,
    producing: gl.constexpr,
):
    """Program: (sequence and KV head, split, tile of packed queries)."""
    keys: gl.constexpr = lines.block_shape[0]
    width: gl.constexpr = lines.block_shape[1]
    dtype: gl.constexpr = lines.dtype
    program = gl.program_id(0)
    tile = program % tiles
    split = program // tiles % splits
    sequence = program // (tiles * splits) // kv_heads
    kv_head = program // (tiles * splits) % kv_heads
    end = gl.load(ends + sequence)
    # Blocks of the sequence's pages come first (full ones up to middle), then those of its new tokens.
    held = (end + keys - 1) // keys
    blocks = held + (tokens + keys - 1) // keys
    begin = (split * blocks) // splits
    stop = ((split + 1) * blocks) // splits
    middle = gl.maximum(begin, gl.minimum(stop, end // keys))
    first = tile * (2 * 64)
    start = (sequence * tokens).to(gl.int64)
    heads = kv_heads * groups
    head = kv_head * groups
    mine = split.to(gl.int64) * all_lines + start * heads + head

    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, width], dtype)
    ring_q = gl.allocate_shared_memory(dtype, [2, 64, width], layout)
    ring_k = gl.allocate_shared_memory(dtype, [stages, keys, width], lines.layout)
    ring_v = gl.allocate_shared_memory(dtype, [stages, keys, width], lines.layout)
    has_k = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    has_v = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    free_k = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    free_v = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(has_k.index(i), count=1)
        mbarrier.init(has_v.index(i), count=1)
        mbarrier.init(free_k.index(i), count=2)
        mbarrier.init(free_v.index(i), count=2)
    fence_async_shared()
    gdc_launch_dependents()
    consumer_args = (
        (
            query + start * query_stride + head * width,
            mixed_out,
            top_out,
            total_out,
            query_stride,
            mine,
            first,
            heads,
            tokens * groups - first,
        ),
        (ring_q, ring_k, ring_v, has_k, has_v, free_k, free_v),
        (begin, stop, held, end, tokens, scale),
    )
    producer_args = (
        (
            lines,
            pool,
            key + start * key_stride + kv_head * width,
            value + start * value_stride + kv_head * width,
            key_stride,
            value_stride,
            kv_heads * width,
            kv_head * width,
            tables + sequence * max_pages,
        ),
        (ring_k, ring_v, has_k, has_v, free_k, free_v),
        (begin, middle, stop, held, end, tokens),
    )
    gl.warp_specialize(
        [
            (_consumer, (consumer_args, 0, stages, groups, is_whole)),
            (_consumer, (consumer_args, 1, stages, groups, is_whole)),
            (_producer, (producer_args, page, stages)),
        ],
        [4, 4],
        [registers, producing],
    )


def supports(query: Tensor, pool: Tensor) -> bool:
    """Return whether the kernel supports a pass: Hopper and `fits_hopper`."""
    return query.is_cuda and is_hopper(query.device) and fits_hopper(query, pool)


def descriptor_of(pool: Tensor) -> TensorDescriptor:
    """Return the TMA descriptor of a pool's blocks of keys and values."""
    pages, halves, page, kv_heads, width = pool.shape
    layout = gl.NVMMASharedLayout.get_default_for([HOPPER_KEYS, width], _DTYPES[pool.dtype])
    lines = pool.view(pages * halves * page, kv_heads * width)
    return TensorDescriptor.from_tensor(lines, [HOPPER_KEYS, width], layout)


def attend(
    tensors: tuple[Tensor, Tensor, Tensor],
    pool: Tensor,
    descriptor: TensorDescriptor,
    fields: Mapping[str, Tensor],
    factor: float,
    shape: AttentionShape,
    splits: int | None = None,
) -> Tensor:
    """Attend to each sequence's pages and to all of its new tokens, for passes that `supports` accepts.

    tensors: query [T, heads, width], key and value [T, kv_heads, width], the last two dimensions of each contiguous;
    pool: see `make_pools`; descriptor: of the pool; fields: ends int32 [sequences], tables int32 [sequences * pages];
    factor: the scale times log2(e); splits: KV splits, None for as many as fill the device. Returns [T, heads, width]
    in the query's dtype.
    """
    query, key, value = tensors
    count, heads, width = query.shape
    page, kv_heads = pool.shape[2], pool.shape[3]
    tiles, full = PackedQueries.of(query, pool, shape).hopper
    splits = splits or full
    out = torch.empty((count, heads, width), dtype=query.dtype, device=query.device)
    mixed, top, total = split_outputs(out, splits)
    _gqa_packed_kernel[(tiles * splits * shape.sequences * kv_heads,)](
        query,
        key,
        value,
        pool,
        descriptor,
        mixed,
        top,
        total,
        fields["ends"],
        fields["tables"],
        factor,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        shape.tokens,
        shape.pages,
        kv_heads,
        count * heads,
        tiles,
        splits,
        page=page,
        groups=heads // kv_heads,
        stages=STAGES,
        is_whole=splits == 1,
        registers=REGISTERS[0],
        producing=REGISTERS[1],
        num_warps=4,
        launch_pdl=True,
    )
    if splits > 1:
        combine(mixed, top, total, out)
    return out
