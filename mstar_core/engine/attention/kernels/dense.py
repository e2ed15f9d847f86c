"""Attention of whole frames without a mask, for Hopper: each program takes many of a head's tokens. Used by `paged`.

A frame of 258 tokens and 16 heads walks through up to ten thousand keys, other ones in each layer, so they come from
memory and not from the second-level cache. Here a program takes 128 tokens, the last one of a row those left over too,
by one head and a share of the keys: two programs read a key, where one for each 64 tokens made it five.

A program is made of groups of four warps: one that brings blocks of keys and values into a ring of shared memory, two
that take 64 tokens each, and one for the few tokens left over behind them, with its products turned around, so that
those tokens are the short side of an instruction and not 64 rows that are mostly empty. The groups wait for one another
only through the ring, so that one computes powers while another multiplies (after Shah et al., FlashAttention-3, 2024).
All tokens by one program with both by turns, and the scores of a block before the values of the one before it, were
slower. Every sum has a fixed order: the same inputs, the same bits.
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

from mstar_core.engine.attention.kernels.split_kv import join, shared
from mstar_core.layers.kernels.launch import is_hopper

if TYPE_CHECKING:
    from torch import Tensor

TOKENS: Final = 128
"""Of a program, besides those left over: 64, the rows of a tensor-core instruction, for each of two groups."""

KEYS: Final = 128
"""Keys of one block."""

STAGES: Final = 3
"""Blocks in shared memory."""

REGISTERS: Final = (216, 48, 32)
"""Of a thread of the groups with tokens, of that with those left over, and of that which brings keys, of 65,536."""

WIDTH: Final = 64
"""Lanes of a head."""

MOST_LEFT: Final = 16
"""Most tokens behind whole tiles that are taken turned around; more are a tile of their own."""

PROCESSORS: Final = 132
"""Of an H100, each of which holds one program."""

MOST_SHARES: Final = 8

_DTYPES: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def soften(score, top, total, scale, limit, is_masked: gl.constexpr):
    """One block of scores: weights, by how much former sums shrink, the new maximum and sum of weights."""
    if is_masked:
        key = gl.arange(0, score.shape[1], layout=gl.SliceLayout(0, score.type.layout))
        score = gl.where(key[None, :] < limit, score, -1.0e30)
    higher = gl.maximum(top, gl.max(score, axis=1) * scale)
    weight = gl.exp2(score * scale - higher[:, None])
    shrink = gl.exp2(top - higher)
    return weight, shrink, higher, total * shrink + gl.sum(weight, axis=1)


@gluon.jit
def _queries(query, first, count, stride, layout: gl.constexpr):
    """[64, 64] of queries from `first` on, zeros beyond `count`."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    at = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    place = query + (first + row)[:, None] * stride + at[None, :]
    return gl.load(place, mask=(row < count)[:, None] & (at < 64)[None, :], other=0.0)


@gluon.jit
def _keep(mixed, top, total, mixed_out, top_out, total_out, first, mine, count, heads, is_whole: gl.constexpr):
    """Write a tile's weighted values, and its maxima and sums if others have their share in it."""
    layout: gl.constexpr = mixed.type.layout
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    made = mixed / gl.where(total > 0.0, total, 1.0)[:, None]
    made = gl.convert_layout(made.to(mixed_out.dtype.element_ty), wide)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    at = gl.arange(0, 64, layout=gl.SliceLayout(0, wide))
    line = mine + (first + row) * heads
    gl.store(mixed_out + line[:, None] * 64 + at[None, :], made, mask=(row < count)[:, None] & (at < 64)[None, :])
    if not is_whole:
        own = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        gl.store(top_out + mine + (first + own) * heads, top, mask=own < count)
        gl.store(total_out + mine + (first + own) * heads, total, mask=own < count)


@gluon.jit
def _walk(
    q, mixed, top, total, ring_k, ring_v, has_k, has_v, free, begin, first, last, scale, limit,
    stages: gl.constexpr, is_masked: gl.constexpr,
):  # fmt: skip
    """Blocks first to last, one thing after the other: another group multiplies meanwhile."""
    layout: gl.constexpr = mixed.type.layout
    keys: gl.constexpr = ring_k.shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, keys, 16])
    own: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    zero = gl.zeros([64, keys], gl.float32, scores)
    for i in range(first, last):
        slot = (i - begin) % stages
        phase = (i - begin) // stages & 1
        mbarrier.wait(has_k.index(slot), phase)
        score = warpgroup_mma(q, ring_k.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        weight, shrink, top, total = soften(score, top, total, scale, limit - (i - first) * keys, is_masked)
        mixed = mixed * gl.convert_layout(shrink, gl.SliceLayout(1, layout))[:, None]
        taken = gl.convert_layout(weight.to(q.dtype), own)
        mbarrier.wait(has_v.index(slot), phase)
        mixed = warpgroup_mma(taken, ring_v.index(slot), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=(mixed,))
        mbarrier.arrive(free.index(slot), count=1)
    return mixed, top, total


@gluon.jit
def tokens_part(args, part: gl.constexpr, stages: gl.constexpr, is_whole: gl.constexpr):
    """What a group with tokens does: tile `part` through blocks begin to stop."""
    query, mixed_out, top_out, total_out, ring_k, ring_v, has_k, has_v, free, head, heads, stride = args[0]
    first, mine, count, begin, middle, stop, limit, scale = args[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    keys: gl.constexpr = ring_k.shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, keys, 16])
    line: gl.constexpr = gl.SliceLayout(1, scores)
    own: gl.constexpr = gl.SliceLayout(1, layout)
    first += part * 64
    count -= part * 64
    gdc_wait()
    q = _queries(query + head * 64, first, count, stride, gl.DotOperandLayout(0, scores, 2))
    mixed = gl.zeros([64, 64], gl.float32, layout)
    top = gl.full([64], -1.0e30, gl.float32, line)
    total = gl.zeros([64], gl.float32, line)
    mixed, top, total = _walk(
        q, mixed, top, total, ring_k, ring_v, has_k, has_v, free, begin, begin, middle, scale, limit, stages, False
    )
    mixed, top, total = _walk(
        q, mixed, top, total, ring_k, ring_v, has_k, has_v, free, begin, middle, stop, scale, limit, stages, True
    )
    top = gl.convert_layout(top, own)
    total = gl.convert_layout(total, own)
    _keep(mixed, top, total, mixed_out, top_out, total_out, first, mine, count, heads, is_whole)


@gluon.jit
def left_part(args, stages: gl.constexpr, is_whole: gl.constexpr):
    """What the group with the tokens left over does: keys, then lanes are the rows of its products.

    mine_q: queries [tokens, 64], mine_p: weights [tokens, keys] in shared memory.
    """
    query, mixed_out, top_out, total_out, ring_k, ring_v, has_k, has_v, free, head, heads, stride = args[0]
    mine_q = args[1]
    mine_p = args[2]
    first, mine, count, begin, middle, stop, limit, scale = args[3]
    some: gl.constexpr = mine_q.shape[0]
    keys: gl.constexpr = ring_k.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, some, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    column: gl.constexpr = gl.SliceLayout(0, layout)
    gdc_wait()
    token = gl.arange(0, some, layout=gl.SliceLayout(1, wide))
    at = gl.arange(0, 64, layout=gl.SliceLayout(0, wide))
    place = query + (first + token)[:, None] * stride + head * 64 + at[None, :]
    mine_q.store(gl.load(place, mask=(token < count)[:, None] & (at < 64)[None, :], other=0.0))
    fence_async_shared()
    gl.thread_barrier()
    zero = gl.zeros([keys, some], gl.float32, layout)
    mixed = gl.zeros([64, some], gl.float32, layout)
    # One sum for each place in a block and token: the places are summed at the end.
    sums = gl.zeros([keys, some], gl.float32, layout)
    top = gl.full([some], -1.0e30, gl.float32, column)
    key = gl.arange(0, keys, layout=gl.SliceLayout(1, layout))
    # Without tokens there are only slots to give back.
    busy = gl.where(count > 0, stop, begin)
    for i in range(begin, busy):
        slot = (i - begin) % stages
        phase = (i - begin) // stages & 1
        mbarrier.wait(has_k.index(slot), phase)
        score = warpgroup_mma(ring_k.index(slot), mine_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        known = (i < middle) | (key < limit - (i - middle) * keys)
        score = gl.where(known[:, None], score, -1.0e30)
        higher = gl.maximum(top, gl.max(score, axis=0) * scale)
        weight = gl.exp2(score * scale - higher[None, :])
        shrink = gl.exp2(top - higher)
        top = higher
        sums = sums * shrink[None, :] + weight
        mixed = mixed * shrink[None, :]
        mine_p.store(gl.permute(weight.to(mine_p.dtype), (1, 0)))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(has_v.index(slot), phase)
        mixed = warpgroup_mma(ring_v.index(slot).permute((1, 0)), mine_p.permute((1, 0)), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=(mixed,))
        mbarrier.arrive(free.index(slot), count=1)
    for i in range(busy, stop):
        slot = (i - begin) % stages
        mbarrier.wait(has_v.index(slot), (i - begin) // stages & 1)
        mbarrier.arrive(free.index(slot), count=1)
    total = gl.sum(sums, axis=0)
    made = mixed / gl.where(total > 0.0, total, 1.0)[None, :]
    lane = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    own = gl.arange(0, some, layout=column)
    line = mine + (first + own) * heads
    into = mixed_out + line[None, :] * 64 + lane[:, None]
    gl.store(into, made.to(mixed_out.dtype.element_ty), mask=(own < count)[None, :] & (lane < 64)[:, None])
    if not is_whole:
        gl.store(top_out + line, top, mask=own < count)
        gl.store(total_out + line, total, mask=own < count)


@gluon.jit
def _bring(
    lines, table, ring_k, ring_v, has_k, has_v, free, head, begin, first, last,
    page: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """Bring blocks first to last, which lie within pages."""
    per: gl.constexpr = page // ring_k.shape[1]
    number = gl.load(table + first // per, mask=first < last, other=0)
    for i in range(first, last):
        slot = (i - begin) % stages
        mbarrier.wait(free.index(slot), ((i - begin) // stages & 1) ^ 1)
        start = number * (2 * page) + (i % per) * ring_k.shape[1]
        mbarrier.expect(has_k.index(slot), lines.block_type.nbytes)
        tma.async_copy_global_to_shared(lines, [start, head * 64], has_k.index(slot), ring_k.index(slot))
        mbarrier.expect(has_v.index(slot), lines.block_type.nbytes)
        tma.async_copy_global_to_shared(lines, [start + page, head * 64], has_v.index(slot), ring_v.index(slot))
        number = gl.load(table + (i + 1) // per, mask=i + 1 < last, other=0)


@gluon.jit
def bring_part(args, page: gl.constexpr, stages: gl.constexpr):
    """What the group without tokens does: bring blocks into the ring as it gets free.

    Up to `middle` they lie within pages; those behind it are gathered, of what whole pages hold beyond whole blocks
    and of a last page that is not whole.
    """
    lines, pool, table, ring_k, ring_v, has_k, has_v, free, head, heads, begin = args[0]
    middle, stop, whole, limit, early = args[1]
    keys: gl.constexpr = ring_k.shape[1]
    per: gl.constexpr = page // keys
    rest: gl.constexpr = page % keys
    _bring(lines, table, ring_k, ring_v, has_k, has_v, free, head, begin, begin, early, page, stages)
    gdc_wait()
    _bring(lines, table, ring_k, ring_v, has_k, has_v, free, head, begin, early, middle, page, stages)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = gl.arange(0, keys, layout=gl.SliceLayout(1, layout))
    at = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    for i in range(middle, stop):
        slot = (i - begin) % stages
        mbarrier.wait(free.index(slot), ((i - begin) // stages & 1) ^ 1)
        place = (i - middle) * keys + key + (middle - whole * per) * keys
        known = key < limit - (i - middle) * keys
        of = gl.zeros_like(place) + whole
        if rest > 0:
            of = gl.minimum(place // rest, whole)
        within = place - of * rest + gl.where(of < whole, per * keys, 0)
        line = gl.load(table + of, mask=known, other=0).to(gl.int64) * (2 * page) + within
        source = pool + line[:, None] * (heads * 64) + (head * 64 + at)[None, :]
        mask = known[:, None] & (at < 64)[None, :]
        async_copy.async_copy_global_to_shared(ring_k.index(slot), source, mask=mask)
        async_copy.async_copy_global_to_shared(ring_v.index(slot), source + page * heads * 64, mask=mask)
        async_copy.commit_group()
        async_copy.wait_group(0)
        # What threads wrote is read by the tensor cores: through the other way into shared memory.
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(has_k.index(slot), count=1)
        mbarrier.arrive(has_v.index(slot), count=1)


@gluon.jit
def _frame_kernel(
    query, pool, lines, mixed_out, top_out, total_out, tile_row, tile_start, tile_count, tile_cached, tables, scale,
    stride, max_pages, heads, all_lines, tiles, units, shares, tokens,
    page: gl.constexpr, stages: gl.constexpr, across: gl.constexpr, parts: gl.constexpr, left: gl.constexpr,
    is_whole: gl.constexpr, is_alone: gl.constexpr, registers: gl.constexpr, others: gl.constexpr,
    bringing: gl.constexpr,
):  # fmt: skip
    """Program: (share, row and part of its tokens, head). parts: of a row's tokens; left: room for those left over."""
    keys: gl.constexpr = lines.block_shape[0]
    dtype: gl.constexpr = lines.dtype
    program = gl.program_id(0)
    head = program % heads
    unit = program // heads % units
    share = program // (heads * units)
    slot = unit // parts * tiles
    begin_token = unit % parts * across
    row = gl.load(tile_row + slot)
    first = gl.load(tile_start + slot) + begin_token
    # A spare row has no keys: every share of it is empty, and the join makes zeros of that.
    end = gl.where(row < 0, 0, gl.load(tile_cached + slot) + gl.load(tile_count + slot))
    table = tables + gl.maximum(row, 0) * max_pages
    per: gl.constexpr = page // keys
    whole = end // page
    blocks = whole * per + (end - whole * per * keys + keys - 1) // keys
    begin = (share * blocks) // shares
    stop = ((share + 1) * blocks) // shares
    # Blocks up to middle lie within pages; limit keys are left from there on.
    middle = gl.maximum(begin, gl.minimum(stop, whole * per))
    limit = end - gl.maximum(begin, whole * per) * keys
    # What the only row held before this pass was written by passes before it.
    early = begin
    if is_alone:
        early = gl.maximum(begin, gl.minimum(gl.minimum(middle, begin + stages), (end - tokens) // page * per))
    count = gl.minimum(tokens - begin_token, across)
    mine = share * all_lines + head

    ring_k = gl.allocate_shared_memory(dtype, [stages, keys, 64], lines.layout)
    ring_v = gl.allocate_shared_memory(dtype, [stages, keys, 64], lines.layout)
    has_k = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    has_v = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(has_k.index(i), count=1)
        mbarrier.init(has_v.index(i), count=1)
        mbarrier.init(free.index(i), count=3)
    fence_async_shared()
    gdc_launch_dependents()
    token_args = (
        (query, mixed_out, top_out, total_out, ring_k, ring_v, has_k, has_v, free, head, heads, stride),
        (first, mine, count, begin, middle, stop, limit, scale),
    )
    bring_args = (
        (lines, pool, table, ring_k, ring_v, has_k, has_v, free, head, heads, begin),
        (middle, stop, whole, limit, early),
    )
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([left, 64], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([left, keys], dtype)
    mine_q = gl.allocate_shared_memory(dtype, [left, 64], q_layout)
    mine_p = gl.allocate_shared_memory(dtype, [left, keys], p_layout)
    # Those left over lie behind all whole parts; the last program of a row takes them.
    over = gl.where(unit % parts == parts - 1, tokens - begin_token - across, 0)
    left_args = (token_args[0], mine_q, mine_p, (first + across, mine, over, begin, middle, stop, limit, scale))
    gl.warp_specialize(
        [
            (tokens_part, (token_args, 0, stages, is_whole)),
            (tokens_part, (token_args, 1, stages, is_whole)),
            (left_part, (left_args, stages, is_whole)),
            (bring_part, (bring_args, page, stages)),
        ],
        [4, 4, 4],
        [registers, others, bringing],
    )


def takes(query: Tensor, pool: Tensor, tokens: int) -> bool:
    """Whether a pass runs here: whole tiles of tokens on Hopper, a query head for each of the keys, pages of few rests.

    And few enough rows for their keys to be shared out: with more, programs for 64 tokens fill the chip by themselves,
    and are faster. query: [rows * tokens, heads, width]; pool: as `make_pools` makes it.
    """
    page, kv_heads = pool.shape[2], pool.shape[3]
    count, heads, width = query.shape
    is_fit = query.is_cuda and query.dtype in _DTYPES and query.dtype == pool.dtype and is_hopper(query.device)
    # What pages hold beyond whole blocks is gathered, which pays for little of them only.
    is_paged = page >= KEYS and page % KEYS <= page // 8 and pool.is_contiguous()
    # A program has room for so many tokens whether they are there or not.
    is_full = parts_of(tokens)[0] * TOKENS <= tokens * 5 // 4
    is_shared = shares_of(count // tokens, tokens, heads) > 1
    return is_fit and is_paged and is_full and is_shared and heads == kv_heads and width == WIDTH


def parts_of(tokens: int) -> tuple[int, int]:
    """By how many programs a row's tokens are taken, and how many are left over behind those of the last."""
    over = tokens % TOKENS
    if tokens > TOKENS and 0 < over <= MOST_LEFT:
        return tokens // TOKENS, over
    return -(-tokens // TOKENS), 0


def shares_of(rows: int, tokens: int, heads: int) -> int:
    """By how many programs the keys of each part of a row are taken: as many as run at once."""
    return min(MOST_SHARES, max(1, PROCESSORS // (rows * parts_of(tokens)[0] * heads)))


def blocks_of(pool: Tensor) -> TensorDescriptor:
    """What the copy engine takes blocks of keys and values of a pool by."""
    pages, halves, page, kv_heads, width = pool.shape
    layout = gl.NVMMASharedLayout.get_default_for([KEYS, width], _DTYPES[pool.dtype])
    lines = pool.view(pages * halves * page, kv_heads * width)
    return TensorDescriptor.from_tensor(lines, [KEYS, width], layout)


def attend(
    query: Tensor, pool: Tensor, blocks: TensorDescriptor, fields: dict[str, Tensor], factor: float,
    *, tokens: int, max_pages: int, shares: int,
) -> Tensor:  # fmt: skip
    """`split.attend_shared` of passes that `takes` takes. tokens: of each row; blocks: of the pool."""
    count, heads, width = query.shape
    rows, all_lines, (parts, over) = count // tokens, count * heads, parts_of(tokens)
    out = torch.empty((count, heads, width), dtype=query.dtype, device=query.device)
    mixed, top, total = shared(out, shares)
    _frame_kernel[(rows * parts * heads * shares,)](
        query, pool, blocks, mixed, top, total, fields["row"], fields["start"], fields["count"], fields["cached"],
        fields["tables"], factor, query.stride(0), max_pages, heads, all_lines, len(fields["row"]) // rows,
        rows * parts, shares, tokens,
        page=pool.shape[2], stages=STAGES, across=TOKENS, parts=parts, left=8 if over <= 8 else MOST_LEFT,
        is_whole=shares == 1, is_alone=rows == 1, registers=REGISTERS[0], others=REGISTERS[1], bringing=REGISTERS[2],
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    if shares > 1:
        join(mixed, top, total, out)
    return out
