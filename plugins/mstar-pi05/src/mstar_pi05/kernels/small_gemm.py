"""Products of a block over the few rows of one request's actions, for Hopper. Used by `expert`; importing it needs
triton.

A product of 50 rows is over in the time in which its weights arrive, and nothing else of it may wait for them. So a
program asks for all of its weights before it waits for the kernels in front of it (programmatic dependent launch): when
the activations are there, they alone are still to be read. What a product's reader would do to each value by itself is
done to it here: rotation behind the packed projection, GELU behind gate and up.

Written in Gluon, in which copies and waits stand where they are wanted: in Triton a copy outside of a loop goes through
registers, and one in a loop cannot begin before the wait. Every sum has a fixed order: the same inputs, the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.kernels.launch import is_hopper

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_pi05.nodes.gemma import Rotation

ROWS: Final = 64
"""Rows of a program, all there are: those of one tensor-core instruction."""

CHUNK: Final = 128
"""Inputs of one tile."""

WARPS: Final = 4
"""One group of warps, whose instructions take all rows."""

WIDEST: Final = 1024
"""Most inputs of a product that is not cut along them: what a program can hold of them for its outputs."""

SLICE: Final = 512
"""Inputs of one slice of a product that is cut; half of that where there are few."""

_DTYPES: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _pair(
    x, weight, first, second, start,
    rows: gl.constexpr, block: gl.constexpr, chunk: gl.constexpr, count: gl.constexpr, buffers: gl.constexpr,
    is_pair: gl.constexpr,
):  # fmt: skip
    """x[:, start : start + count * chunk] times weight[first : first + block], and times that from `second` on.

    Returns float32 [rows, block] twice. is_pair: else the second is nothing.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, block, 16])
    # One barrier for each tile of weights, then one for each buffer of activations.
    bars = gl.allocate_shared_memory(gl.int64, [count + buffers, 1], mbarrier.MBarrierLayout())
    one = gl.allocate_shared_memory(weight.dtype, [count, block, chunk], weight.layout)
    two = one
    if is_pair:
        two = gl.allocate_shared_memory(weight.dtype, [count, block, chunk], weight.layout)
    given = gl.allocate_shared_memory(x.dtype, [buffers, rows, chunk], x.layout)
    for i in gl.static_range(count + buffers):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    for i in gl.static_range(count):
        mbarrier.expect(bars.index(i), weight.block_type.nbytes * (2 if is_pair else 1))
        tma.async_copy_global_to_shared(weight, [first, start + i * chunk], bars.index(i), one.index(i))
        if is_pair:
            tma.async_copy_global_to_shared(weight, [second, start + i * chunk], bars.index(i), two.index(i))
    gdc_wait()
    for i in gl.static_range(buffers):
        mbarrier.expect(bars.index(count + i), x.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [0, start + i * chunk], bars.index(count + i), given.index(i))
    a = gl.full([rows, block], 0.0, gl.float32, layout)
    b = a
    for i in gl.static_range(count):
        mbarrier.wait(bars.index(i), 0)
        mbarrier.wait(bars.index(count + i % buffers), (i // buffers) % 2)
        tile = given.index(i % buffers)
        a = warpgroup_mma(tile, one.index(i).permute((1, 0)), a, is_async=True)
        if is_pair:
            b = warpgroup_mma(tile, two.index(i).permute((1, 0)), b, is_async=True)
            b = warpgroup_mma_wait(num_outstanding=0, deps=(b,))
        a = warpgroup_mma_wait(num_outstanding=0, deps=(a,))
        if i + buffers < count:
            bar = bars.index(count + i % buffers)
            mbarrier.expect(bar, x.block_type.nbytes)
            tma.async_copy_global_to_shared(x, [0, start + (i + buffers) * chunk], bar, tile)
    return a, b


@gluon.jit
def _split_k_kernel(
    x, weight, out, tokens, outputs,
    rows: gl.constexpr, block: gl.constexpr, chunk: gl.constexpr, count: gl.constexpr, buffers: gl.constexpr,
):  # fmt: skip
    """out[part, row, output] = the product over one slice of the inputs. Grid: (blocks of outputs, slices)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, block, 16])
    part = gl.program_id(1)
    first = gl.program_id(0) * block
    total, _ = _pair(x, weight, first, first, part * (chunk * count), rows, block, chunk, count, buffers, False)
    row = gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    at = first + gl.arange(0, block, layout=gl.SliceLayout(0, layout))
    into = out + (part * tokens + row[:, None]) * outputs + at[None, :]
    gl.store(into, total.to(out.dtype.element_ty), mask=row[:, None] < tokens)


@gluon.jit
def _gate_up_gelu_kernel(
    x, weight, out, tokens, inner,
    rows: gl.constexpr, block: gl.constexpr, chunk: gl.constexpr, count: gl.constexpr, buffers: gl.constexpr,
):  # fmt: skip
    """out = gelu(gate) * up, of one weight [2 * inner, inputs] with the gate's rows first. Grid: (blocks of inner,)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, block, 16])
    first = gl.program_id(0) * block
    a, b = _pair(x, weight, first, inner + first, 0, rows, block, chunk, count, buffers, True)
    # Rounded where separate layers would round; (1 + tanh(u)) / 2 is the sigmoid of 2u.
    dtype: gl.constexpr = out.dtype.element_ty
    gate, up = a.to(dtype).to(gl.float32), b.to(dtype).to(gl.float32)
    away = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    value = (gate / (1.0 + gl.exp(away))).to(dtype).to(gl.float32) * up
    row = gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    at = first + gl.arange(0, block, layout=gl.SliceLayout(0, layout))
    gl.store(out + row[:, None] * inner + at[None, :], value.to(dtype), mask=row[:, None] < tokens)


@gluon.jit
def _qkv_rotary_kernel(
    x, weight, cosine, sine, out, tokens,
    heads: gl.constexpr, kv_heads: gl.constexpr, head_dim: gl.constexpr,
    rows: gl.constexpr, block: gl.constexpr, chunk: gl.constexpr, count: gl.constexpr, buffers: gl.constexpr,
):  # fmt: skip
    """out = queries [T, heads, head_dim], then keys and values [T, kv_heads, head_dim], all but the values rotated.

    Grid: (pairs of blocks of outputs,): a block of the first halves of a head's pairs, and that of their second halves.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, block, 16])
    half: gl.constexpr = head_dim // 2
    head = gl.program_id(0) // (half // block)
    begin = gl.program_id(0) % (half // block) * block
    first = head * head_dim + begin
    a, b = _pair(x, weight, first, first + half, 0, rows, block, chunk, count, buffers, True)
    dtype: gl.constexpr = out.dtype.element_ty
    one, two = a.to(dtype).to(gl.float32), b.to(dtype).to(gl.float32)
    row = gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    at = begin + gl.arange(0, block, layout=gl.SliceLayout(0, layout))
    inside = row[:, None] < tokens
    turns = inside & (head < heads + kv_heads)
    c = gl.load(cosine + row[:, None] * head_dim + at[None, :], mask=turns, other=1.0)
    s = gl.load(sine + row[:, None] * head_dim + at[None, :], mask=turns, other=0.0)
    # Which of the three it belongs to: 0 queries, 1 keys, 2 values; how many heads lie before that, and how many in it.
    which = (head >= heads).to(gl.int32) + (head >= heads + kv_heads).to(gl.int32)
    before = (which > 0).to(gl.int32) * heads + (which > 1).to(gl.int32) * kv_heads
    across = heads + (which > 0).to(gl.int32) * (kv_heads - heads)
    into = out + (tokens * before + head - before) * head_dim + row[:, None] * (across * head_dim) + at[None, :]
    gl.store(into, (one * c - two * s).to(dtype), mask=inside)
    gl.store(into + half, (two * c + one * s).to(dtype), mask=inside)


def supports(x: Tensor, inner: int, across: int, head_dim: int) -> bool:
    """Whether a block runs here: few rows in half precision on Hopper, and sizes that tiles divide.

    x: [T, width]; inner: of the feed-forward part; across: heads times head_dim.
    """
    if not x.is_cuda or not 0 < x.shape[0] <= ROWS or x.dtype not in _DTYPES or not x.is_contiguous():
        return False
    width = x.shape[1]
    is_held = width % CHUNK == 0 and width <= WIDEST
    return is_held and across % SLICE == 0 and inner % SLICE == 0 and head_dim % 32 == 0 and is_hopper(x.device)


def qkv_rotary(
    x: Tensor, weight: Tensor, rotation: Rotation, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys of one projection, and its values. weight: [(heads + 2 * kv_heads) * head_dim, inputs].

    x: [T, inputs]; rotation: cosine and sine, float32 [T, 1, head_dim]. Returns queries [T, heads, head_dim], keys and
    values [T, kv_heads, head_dim].
    """
    (tokens, inputs), head_dim, block = x.shape, rotation[0].shape[-1], 16
    count = inputs // CHUNK
    out = torch.empty(tokens * weight.shape[0], dtype=x.dtype, device=x.device)
    _qkv_rotary_kernel[(weight.shape[0] // (2 * block),)](
        _tiles(x, ROWS, CHUNK), _tiles(weight, block, CHUNK), *rotation, out, tokens, heads, kv_heads, head_dim,
        rows=ROWS, block=block, chunk=CHUNK, count=count, buffers=count, num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    sizes = [tokens * number * head_dim for number in (heads, kv_heads, kv_heads)]
    query, key, value = (part.view(tokens, -1, head_dim) for part in out.split(sizes))
    return query, key, value


def gate_up_gelu(x: Tensor, weight: Tensor) -> Tensor:
    """gelu(x @ gate.T) * (x @ up.T) of one weight [2 * inner, inputs], gate first, tanh form. Returns [T, inner]."""
    (tokens, inputs), inner, block = x.shape, weight.shape[0] // 2, 32
    count = inputs // CHUNK
    out = torch.empty((tokens, inner), dtype=x.dtype, device=x.device)
    _gate_up_gelu_kernel[(inner // block,)](
        _tiles(x, ROWS, CHUNK), _tiles(weight, block, CHUNK), out, tokens, inner, rows=ROWS, block=block, chunk=CHUNK,
        count=count, buffers=min(count, 5), num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    return out


def split_k(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in slices of the inputs, to be summed: float32 [S, T, outputs]. x: [T, inputs]."""
    (tokens, inputs), outputs, block = x.shape, weight.shape[0], 64
    size = SLICE if inputs > 4 * SLICE else SLICE // 2
    out = torch.empty((inputs // size, tokens, outputs), dtype=torch.float32, device=x.device)
    _split_k_kernel[(outputs // block, inputs // size)](
        _tiles(x, ROWS, CHUNK), _tiles(weight, block, CHUNK), out, tokens, outputs, rows=ROWS, block=block, chunk=CHUNK,
        count=size // CHUNK, buffers=size // CHUNK, num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    return out


def _tiles(matrix: Tensor, lines: int, chunk: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([lines, chunk], _DTYPES[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, [lines, chunk], layout)
