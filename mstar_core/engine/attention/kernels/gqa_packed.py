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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from mstar_core.engine.attention.kernels.gqa_packed_warps import bring_part, queries_part
from mstar_core.engine.attention.kernels.split_kv import join, shared
from mstar_core.engine.attention.kernels.tile_heuristics import HOPPER_KEYS, Folds, fits_hopper
from mstar_core.layers.fused import is_hopper

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.passes import PassShape

STAGES: Final = 2
"""Blocks in shared memory, beside 64 KiB of queries."""

REGISTERS: Final = (232, 40)
"""Of a thread of the groups with queries, and of that which brings keys, of 65,536."""

_DTYPES: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


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
