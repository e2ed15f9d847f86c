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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from mstar_core.engine.attention.kernels.dense_warps import bring_part, left_part, tokens_part
from mstar_core.engine.attention.kernels.split_kv import join, shared
from mstar_core.layers.fused import is_hopper

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
