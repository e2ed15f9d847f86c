"""Attention of passes that only read, for Hopper: flow steps of several requests. Used by `reading`.

A row of 50 tokens whose eight query heads share one key head is 400 folded queries, which all see the same nine
hundred keys. A program takes 128 of them and a share of the keys: there are as many shares as fill the chip, and
`split` joins what they found. A program is made of groups of four warps: two take 64 queries each, one brings blocks
of keys and values into a ring of shared memory. What a row's pages hold does not come from the kernel in front, so
that it is brought while that still runs; queries and the row's own keys wait for it. Every sum has a fixed order: the
same inputs, the same bits.
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

from mstar_core.engine.attention.kernels.dense import soften
from mstar_core.engine.attention.kernels.split_kv import join, shared
from mstar_core.engine.attention.kernels.tile_heuristics import HOPPER_KEYS, Folds, fits_hopper
from mstar_core.layers.kernels.launch import is_hopper

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.passes import PassShape

STAGES: Final = 2
"""Blocks in shared memory, beside 64 KiB of queries."""

REGISTERS: Final = (232, 40)
"""Of a thread of the groups with queries, and of that which brings keys, of 65,536."""

_DTYPES: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _copy(into, source, stride, count):
    """Ask for `count` lines of a block, zeros behind them: what nobody wrote may be no number, and zero times it too.

    source: of the first line; stride: elements from line to line.
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
def _arrived():
    """Wait for what this group has asked for; tensor cores read it the other way into shared memory."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _keep(mixed, top, total, mine_q, out, count, groups: gl.constexpr, is_whole: gl.constexpr):
    """Write what the queries found, through the room of the queries themselves, and maxima and sums of a share.

    out: where the three go, the first line in them and the lines from token to token.
    """
    mixed_out, top_out, total_out, mine, first, heads = out
    layout: gl.constexpr = mixed.type.layout
    width: gl.constexpr = mixed.shape[1]
    across: gl.constexpr = 32 if width >= 256 else width // 8
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    made = mixed * (1.0 / gl.where(total > 0.0, total, 1.0))[:, None]
    gl.thread_barrier()
    mine_q.store(made.to(mixed_out.dtype.element_ty))
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
def _ask(query, mine_q, first, count, stride, groups: gl.constexpr):
    """Ask for 64 folded queries from `first` on, zeros beyond `count`. query: of the row's first token and head."""
    width: gl.constexpr = mine_q.shape[1]
    across: gl.constexpr = 32 if width >= 256 else width // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    at = gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    place = (first + row) // groups * stride + (first + row) % groups * width
    mask = (row < count)[:, None] & (at < width)[None, :]
    async_copy.async_copy_global_to_shared(mine_q, query + place[:, None] + at[None, :], mask=mask)


@gluon.jit
def queries_part(args, part: gl.constexpr, stages: gl.constexpr, groups: gl.constexpr, is_whole: gl.constexpr):
    """What a group with queries does: 64 of them through blocks begin to stop, one thing after the other.

    Another group multiplies meanwhile.
    """
    query, mixed_out, top_out, total_out, query_stride, mine, first, heads, count = args[0]
    ring_q, ring_k, ring_v, has_k, has_v, free_k, free_v = args[1]
    begin, stop, held, end, tokens, scale = args[2]
    keys: gl.constexpr = ring_k.shape[1]
    width: gl.constexpr = ring_k.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16])
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, keys, 16])
    line: gl.constexpr = gl.SliceLayout(1, scores)
    own: gl.constexpr = gl.SliceLayout(1, layout)
    weights: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    mine_q = ring_q.index(part)
    first += part * 64
    count -= part * 64
    gdc_wait()
    _ask(query, mine_q, first, count, query_stride, groups)
    _arrived()
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
        weight, shrink, top, total = soften(score, top, total, scale, limit, True)
        mixed = mixed * gl.convert_layout(shrink, own)[:, None]
        taken = gl.convert_layout(weight.to(ring_k.dtype), weights)
        mbarrier.wait(has_v.index(slot), phase)
        mixed = warpgroup_mma(taken, ring_v.index(slot), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=(mixed,))
        mbarrier.arrive(free_v.index(slot), count=1)
    out = (mixed_out, top_out, total_out, mine, first, heads)
    top = gl.convert_layout(top, own)
    _keep(mixed, top, gl.convert_layout(total, own), mine_q, out, count, groups, is_whole)


@gluon.jit
def bring_part(args, page: gl.constexpr, stages: gl.constexpr):
    """What the group without queries does: bring blocks into the ring as it gets free.

    Those of the pages are there before the kernels in front end; a last one that is not whole, and the row's own, are
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
        # What both kinds of blocks have in common is kept in few registers: one way to copy, with a source of its own.
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
        _arrived()
        mbarrier.arrive(has_k.index(slot), count=1)
        mbarrier.arrive(has_v.index(slot), count=1)


_COUNTS: Final = ("tokens", "max_pages", "kv_heads", "all_lines", "tiles", "shares")
"""Numbers of which nothing depends on whether they are one or even: the kernel is compiled once for all of them."""


@gluon.jit(do_not_specialize=_COUNTS)
def _folded_kernel(
    query, key, value, pool, lines, mixed_out, top_out, total_out, ends, tables, scale,
    query_stride, key_stride, value_stride, tokens, max_pages, kv_heads, all_lines, tiles, shares,
    page: gl.constexpr, groups: gl.constexpr, stages: gl.constexpr, is_whole: gl.constexpr,
    registers: gl.constexpr, bringing: gl.constexpr,
):  # fmt: skip
    """Program: (row and key head, share, tile of its folded queries)."""
    keys: gl.constexpr = lines.block_shape[0]
    width: gl.constexpr = lines.block_shape[1]
    dtype: gl.constexpr = lines.dtype
    program = gl.program_id(0)
    tile = program % tiles
    share = program // tiles % shares
    row = program // (tiles * shares) // kv_heads
    kv_head = program // (tiles * shares) % kv_heads
    end = gl.load(ends + row)
    # Blocks of the row's pages, of which those up to middle are whole, then those of its own tokens.
    held = (end + keys - 1) // keys
    blocks = held + (tokens + keys - 1) // keys
    begin = (share * blocks) // shares
    stop = ((share + 1) * blocks) // shares
    middle = gl.maximum(begin, gl.minimum(stop, end // keys))
    first = tile * (2 * 64)
    start = (row * tokens).to(gl.int64)
    heads = kv_heads * groups
    head = kv_head * groups
    mine = share.to(gl.int64) * all_lines + start * heads + head

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
    queries_args = (
        (
            query + start * query_stride + head * width, mixed_out, top_out, total_out, query_stride, mine, first,
            heads, tokens * groups - first,
        ),
        (ring_q, ring_k, ring_v, has_k, has_v, free_k, free_v),
        (begin, stop, held, end, tokens, scale),
    )  # fmt: skip
    bring_args = (
        (
            lines, pool, key + start * key_stride + kv_head * width, value + start * value_stride + kv_head * width,
            key_stride, value_stride, kv_heads * width, kv_head * width, tables + row * max_pages,
        ),
        (ring_k, ring_v, has_k, has_v, free_k, free_v),
        (begin, middle, stop, held, end, tokens),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (queries_part, (queries_args, 0, stages, groups, is_whole)),
            (queries_part, (queries_args, 1, stages, groups, is_whole)),
            (bring_part, (bring_args, page, stages)),
        ],
        [4, 4],
        [registers, bringing],
    )


def takes(query: Tensor, pool: Tensor) -> bool:
    """Whether a pass runs here: on Hopper, if it `fits_hopper`."""
    return query.is_cuda and is_hopper(query.device) and fits_hopper(query, pool)


def blocks_of(pool: Tensor) -> TensorDescriptor:
    """What the copy engine takes blocks of keys and values of a pool by."""
    pages, halves, page, kv_heads, width = pool.shape
    layout = gl.NVMMASharedLayout.get_default_for([HOPPER_KEYS, width], _DTYPES[pool.dtype])
    lines = pool.view(pages * halves * page, kv_heads * width)
    return TensorDescriptor.from_tensor(lines, [HOPPER_KEYS, width], layout)


def attend(
    given: tuple[Tensor, Tensor, Tensor], pool: Tensor, blocks: TensorDescriptor, fields: dict[str, Tensor],
    factor: float, shape: PassShape, shares: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention of passes that `takes` takes: every token sees its row's pages and all of the row's own tokens.

    given: query [T, heads, width], key and value [T, kv_heads, width], of each the last two dimensions contiguous;
    pool: as `make_pools` makes it, blocks: of it; fields: ends int32 [rows], tables int32 [rows * pages]; factor: the
    scale times log2(e); shares: None: as many as fill the chip. Returns [T, heads, width] in the query's dtype.
    """
    query, key, value = given
    count, heads, width = query.shape
    page, kv_heads = pool.shape[2], pool.shape[3]
    tiles, full = Folds.of(query, pool, shape).hopper
    shares = shares or full
    out = torch.empty((count, heads, width), dtype=query.dtype, device=query.device)
    mixed, top, total = shared(out, shares)
    _folded_kernel[(tiles * shares * shape.rows * kv_heads,)](
        query, key, value, pool, blocks, mixed, top, total, fields["ends"], fields["tables"], factor,
        query.stride(0), key.stride(0), value.stride(0), shape.tokens, shape.pages, kv_heads, count * heads, tiles,
        shares, page=page, groups=heads // kv_heads, stages=STAGES, is_whole=shares == 1, registers=REGISTERS[0],
        bringing=REGISTERS[1], num_warps=4, launch_pdl=True,
    )  # fmt: skip
    if shares > 1:
        join(mixed, top, total, out)
    return out
