"""Dense attention without a mask for Hopper, written in Gluon: each program processes many tokens of one head.

A frame of 258 tokens and 16 heads attends to up to ten thousand keys, which differ per layer and so come from memory,
not from the L2 cache. A program processes 128 tokens of one head and a split of the keys; the last program of a row
also processes the remainder. So two programs read each key, not five as with 64 tokens per program.

A program has four warp groups (warp specialization). The producer loads blocks of keys and values into a ring of shared
memory. Two consumers process 64 tokens each. A third one processes the remainder, with transposed products so that
these few tokens are the short side of an instruction. The groups synchronize only through the ring, so one computes
exponentials while another multiplies (after Shah et al., FlashAttention-3, 2024). Two alternatives were slower:
ping-pong scheduling of all tokens in one program, and scores of a block before the values of the previous one. Every
sum has a fixed order, so equal inputs give equal bits.

Slots of the ring have a block of keys and one of values of one head. `has_k` and `has_v` signal a filled slot; `free`
signals that all consumers are done with it. Blocks are counted along the row; block `begin` is a program's first and
uses slot 0. The blocks hand these functions to the cache's view, see `PlacedView`.
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

from mstar_core.engine.attention.kernels.gqa_packed import online_softmax
from mstar_core.engine.attention.kernels.split_kv import combine, split_outputs
from mstar_core.layers.kernels.launch import is_hopper

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

TOKENS: Final = 128
"""Tokens per program without the remainder: 64, the rows of a wgmma instruction, for each of two warp groups."""

KEYS: Final = 128
"""Keys per block."""

STAGES: Final = 3
"""Blocks in shared memory."""

REGISTERS: Final = (216, 48, 32)
"""Registers per thread of the tile consumers, the remainder consumer and the producer, of 65,536 in all."""

WIDTH: Final = 64
"""Supported head dimension."""

MAX_REMAINDER: Final = 16
"""Most tokens after full tiles that the remainder consumer processes; more become a tile of their own."""

PROCESSORS: Final = 132
"""Multiprocessors of an H100, with one program each."""

MAX_SPLITS: Final = 8

_DTYPES: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _load_queries(query, first, count, stride, layout: gl.constexpr):
    """Load [64, 64] queries from `first` on, zeros beyond `count`."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    at = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    place = query + (first + row)[:, None] * stride + at[None, :]
    return gl.load(place, mask=(row < count)[:, None] & (at < 64)[None, :], other=0.0)


@gluon.jit
def _store_tile(mixed, top, total, mixed_out, top_out, total_out, first, mine, count, heads, is_whole: gl.constexpr):
    """Store a tile's output, and its maxima and sums if the keys are split."""
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
def _attend_blocks(
    q,
    mixed,
    top,
    total,
    ring_k,
    ring_v,
    has_k,
    has_v,
    free,
    begin,
    first,
    last,
    scale,
    limit,
    stages: gl.constexpr,
    is_masked: gl.constexpr,
):
    """Attend to blocks first to last in sequence. The other warp group keeps the tensor cores busy meanwhile."""
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
        weight, shrink, top, total = online_softmax(score, top, total, scale, limit - (i - first) * keys, is_masked)
        mixed = mixed * gl.convert_layout(shrink, gl.SliceLayout(1, layout))[:, None]
        taken = gl.convert_layout(weight.to(q.dtype), own)
        mbarrier.wait(has_v.index(slot), phase)
        mixed = warpgroup_mma(taken, ring_v.index(slot), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=(mixed,))
        mbarrier.arrive(free.index(slot), count=1)
    return mixed, top, total


@gluon.jit
def _tile_consumer(args, part: gl.constexpr, stages: gl.constexpr, is_whole: gl.constexpr):
    """Warp group that attends for the 64 tokens of tile `part` to blocks begin to stop."""
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
    q = _load_queries(query + head * 64, first, count, stride, gl.DotOperandLayout(0, scores, 2))
    mixed = gl.zeros([64, 64], gl.float32, layout)
    top = gl.full([64], -1.0e30, gl.float32, line)
    total = gl.zeros([64], gl.float32, line)
    mixed, top, total = _attend_blocks(
        q, mixed, top, total, ring_k, ring_v, has_k, has_v, free, begin, begin, middle, scale, limit, stages, False
    )
    mixed, top, total = _attend_blocks(
        q, mixed, top, total, ring_k, ring_v, has_k, has_v, free, begin, middle, stop, scale, limit, stages, True
    )
    top = gl.convert_layout(top, own)
    total = gl.convert_layout(total, own)
    _store_tile(mixed, top, total, mixed_out, top_out, total_out, first, mine, count, heads, is_whole)


@gluon.jit
def _remainder_consumer(args, stages: gl.constexpr, is_whole: gl.constexpr):
    """Warp group that attends for the remainder tokens. Its products are transposed, with keys, then channels as rows.

    mine_q: queries [tokens, 64], mine_p: weights [tokens, keys], both in shared memory.
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
    # One sum per key position in a block and token. They are reduced at the end.
    sums = gl.zeros([keys, some], gl.float32, layout)
    top = gl.full([some], -1.0e30, gl.float32, column)
    key = gl.arange(0, keys, layout=gl.SliceLayout(1, layout))
    # Without tokens this group only releases slots.
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
def _load_blocks(
    lines, table, ring_k, ring_v, has_k, has_v, free, head, begin, first, last, page: gl.constexpr, stages: gl.constexpr
):
    """Load blocks first to last, which lie within pages."""
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
def _producer(args, page: gl.constexpr, stages: gl.constexpr):
    """Warp group that loads blocks into free slots of the ring.

    Blocks up to `middle` lie within pages. Later ones are gathered from the remainders of full pages and from a partial
    last page.
    """
    lines, pool, table, ring_k, ring_v, has_k, has_v, free, head, heads, begin = args[0]
    middle, stop, whole, limit, early = args[1]
    keys: gl.constexpr = ring_k.shape[1]
    per: gl.constexpr = page // keys
    rest: gl.constexpr = page % keys
    _load_blocks(lines, table, ring_k, ring_v, has_k, has_v, free, head, begin, begin, early, page, stages)
    gdc_wait()
    _load_blocks(lines, table, ring_k, ring_v, has_k, has_v, free, head, begin, early, middle, page, stages)
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
        # The tensor cores read these writes through the async proxy.
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(has_k.index(slot), count=1)
        mbarrier.arrive(has_v.index(slot), count=1)


# racecheck: the partitions get their arguments and their end through shared memory. The compiler orders this by one
# named barrier that warps reach from two places, which the tool does not follow.
@gluon.jit
def _dense_kernel(
    query,
    pool,
    lines,
    mixed_out,
    top_out,
    total_out,
    tile_row,
    tile_start,
    tile_count,
    tile_cached,
    tables,
    scale,
    stride,
    max_pages,
    heads,
    all_lines,
    tiles,
    units,
    splits,
    tokens,
    page: gl.constexpr,
    stages: gl.constexpr,
    across: gl.constexpr,
    parts: gl.constexpr,
    left: gl.constexpr,
    is_whole: gl.constexpr,
    is_alone: gl.constexpr,
    registers: gl.constexpr,
    others: gl.constexpr,
    producing: gl.constexpr,
):
    """Program: (split, row and part of its tokens, head). parts: per row; left: padded size of the remainder."""
    keys: gl.constexpr = lines.block_shape[0]
    dtype: gl.constexpr = lines.dtype
    program = gl.program_id(0)
    head = program % heads
    unit = program // heads % units
    split = program // (heads * units)
    slot = unit // parts * tiles
    begin_token = unit % parts * across
    row = gl.load(tile_row + slot)
    first = gl.load(tile_start + slot) + begin_token
    # An unused row has no keys. All its splits are empty, and combining them gives zeros.
    end = gl.where(row < 0, 0, gl.load(tile_cached + slot) + gl.load(tile_count + slot))
    table = tables + gl.maximum(row, 0) * max_pages
    per: gl.constexpr = page // keys
    whole = end // page
    blocks = whole * per + (end - whole * per * keys + keys - 1) // keys
    begin = (split * blocks) // splits
    stop = ((split + 1) * blocks) // splits
    # Blocks up to middle lie within pages; `limit` keys follow them.
    middle = gl.maximum(begin, gl.minimum(stop, whole * per))
    limit = end - gl.maximum(begin, whole * per) * keys
    # With one row, earlier passes wrote its cached keys: these blocks need not wait for this pass's append.
    early = begin
    if is_alone:
        early = gl.maximum(begin, gl.minimum(gl.minimum(middle, begin + stages), (end - tokens) // page * per))
    count = gl.minimum(tokens - begin_token, across)
    mine = split * all_lines + head

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
    tile_args = (
        (query, mixed_out, top_out, total_out, ring_k, ring_v, has_k, has_v, free, head, heads, stride),
        (first, mine, count, begin, middle, stop, limit, scale),
    )
    producer_args = (
        (lines, pool, table, ring_k, ring_v, has_k, has_v, free, head, heads, begin),
        (middle, stop, whole, limit, early),
    )
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([left, 64], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([left, keys], dtype)
    mine_q = gl.allocate_shared_memory(dtype, [left, 64], q_layout)
    mine_p = gl.allocate_shared_memory(dtype, [left, keys], p_layout)
    # The remainder follows all full parts; the last program of a row processes it.
    over = gl.where(unit % parts == parts - 1, tokens - begin_token - across, 0)
    remainder_args = (tile_args[0], mine_q, mine_p, (first + across, mine, over, begin, middle, stop, limit, scale))
    gl.warp_specialize(
        [
            (_tile_consumer, (tile_args, 0, stages, is_whole)),
            (_tile_consumer, (tile_args, 1, stages, is_whole)),
            (_remainder_consumer, (remainder_args, stages, is_whole)),
            (_producer, (producer_args, page, stages)),
        ],
        [4, 4, 4],
        [registers, others, producing],
    )


def supports(query: Tensor, pool: Tensor, tokens: int) -> bool:
    """Return whether this kernel supports a pass and is the faster one.

    It needs Hopper, one query head per KV head, nearly full tiles and pages with a small remainder. With so many rows
    that their keys are not split, programs of 64 tokens fill the device and are faster. query: [rows * tokens, heads,
    width]; pool: see `make_pools`.
    """
    page, kv_heads = pool.shape[2], pool.shape[3]
    count, heads, width = query.shape
    is_fit = query.is_cuda and query.dtype in _DTYPES and query.dtype == pool.dtype and is_hopper(query.device)
    # Keys beyond the full blocks of a page are gathered, which is slow.
    is_paged = page >= KEYS and page % KEYS <= page // 8 and pool.is_contiguous()
    # A partly filled tile costs as much as a full one.
    is_full = parts_of(tokens)[0] * TOKENS <= tokens * 5 // 4
    is_split = splits_of(count // tokens, tokens, heads) > 1
    return is_fit and is_paged and is_full and is_split and heads == kv_heads and width == WIDTH


def parts_of(tokens: int) -> tuple[int, int]:
    """Return the parts of a row's tokens, one per program, and the remainder after the last part."""
    over = tokens % TOKENS
    if tokens > TOKENS and 0 < over <= MAX_REMAINDER:
        return tokens // TOKENS, over
    return -(-tokens // TOKENS), 0


def splits_of(rows: int, tokens: int, heads: int) -> int:
    """Return the KV splits of each part of a row: as many as run at once."""
    return min(MAX_SPLITS, max(1, PROCESSORS // (rows * parts_of(tokens)[0] * heads)))


def descriptor_of(pool: Tensor) -> TensorDescriptor:
    """Return the TMA descriptor of a pool's blocks of keys and values."""
    pages, halves, page, kv_heads, width = pool.shape
    layout = gl.NVMMASharedLayout.get_default_for([KEYS, width], _DTYPES[pool.dtype])
    lines = pool.view(pages * halves * page, kv_heads * width)
    return TensorDescriptor.from_tensor(lines, [KEYS, width], layout)


def attend(
    query: Tensor,
    pool: Tensor,
    descriptor: TensorDescriptor,
    fields: Mapping[str, Tensor],
    factor: float,
    *,
    tokens: int,
    max_pages: int,
    splits: int,
) -> Tensor:
    """Attend as `split_kv.attend_split_kv` does, for passes that `supports` accepts. tokens: per row."""
    count, heads, width = query.shape
    rows, all_lines, (parts, over) = count // tokens, count * heads, parts_of(tokens)
    out = torch.empty((count, heads, width), dtype=query.dtype, device=query.device)
    mixed, top, total = split_outputs(out, splits)
    _dense_kernel[(rows * parts * heads * splits,)](
        query,
        pool,
        descriptor,
        mixed,
        top,
        total,
        fields["row"],
        fields["start"],
        fields["count"],
        fields["cached"],
        fields["tables"],
        factor,
        query.stride(0),
        max_pages,
        heads,
        all_lines,
        len(fields["row"]) // rows,
        rows * parts,
        splits,
        tokens,
        page=pool.shape[2],
        stages=STAGES,
        across=TOKENS,
        parts=parts,
        left=8 if over <= 8 else MAX_REMAINDER,
        is_whole=splits == 1,
        is_alone=rows == 1,
        registers=REGISTERS[0],
        others=REGISTERS[1],
        producing=REGISTERS[2],
        num_warps=4,
        launch_pdl=True,
    )
    if splits > 1:
        combine(mixed, top, total, out)
    return out
