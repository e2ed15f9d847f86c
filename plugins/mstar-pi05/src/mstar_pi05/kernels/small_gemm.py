"""Small-M GEMMs of the action expert for the actions of one request, on Hopper. Used by `expert`.

A GEMM of 50 rows takes as long as loading its weights. A program therefore loads all of its weights before it waits for
the previous kernel (programmatic dependent launch), so that only the activations remain to be read. Element-wise
operations run in the epilogue: rotary embedding after the QKV projection, GELU after gate and up.

Written in Gluon, which allows explicit placement of copies and waits: in Triton, a copy outside of a loop goes through
registers, and one in a loop cannot start before the wait. Sums have a fixed order: the same inputs give the same bits.
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
"""Rows of a program: the M dimension of one wgmma instruction."""

CHUNK: Final = 128
"""Inputs of one tile."""

WARPS: Final = 4
"""Warps of a program: one warp group."""

WIDEST: Final = 1024
"""Maximum inputs of a GEMM without split-K: those that fit into the shared memory of a program."""

SLICE: Final = 512
"""Inputs of one split-K slice; half of that for layers with few inputs."""

_DTYPES: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _pair(
    x,
    weight,
    first,
    second,
    start,
    rows: gl.constexpr,
    block: gl.constexpr,
    chunk: gl.constexpr,
    count: gl.constexpr,
    buffers: gl.constexpr,
    is_pair: gl.constexpr,
):
    """Multiply x[:, start : start + count * chunk] with weight[first : first + block], and with the rows
    from `second` on.

    Returns float32 [rows, block] twice. The second is meaningless unless is_pair.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, block, 16])
    # One barrier per weight tile, then one per activation buffer.
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
    x,
    weight,
    out,
    tokens,
    outputs,
    rows: gl.constexpr,
    block: gl.constexpr,
    chunk: gl.constexpr,
    count: gl.constexpr,
    buffers: gl.constexpr,
):
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
    x,
    weight,
    out,
    tokens,
    inner,
    rows: gl.constexpr,
    block: gl.constexpr,
    chunk: gl.constexpr,
    count: gl.constexpr,
    buffers: gl.constexpr,
):
    """out = gelu(gate) * up, for a weight [2 * inner, inputs] with the gate first. Grid: (blocks of inner,)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, block, 16])
    first = gl.program_id(0) * block
    a, b = _pair(x, weight, first, inner + first, 0, rows, block, chunk, count, buffers, True)
    # Rounded as separate layers would; (1 + tanh(u)) / 2 is the sigmoid of 2u.
    dtype: gl.constexpr = out.dtype.element_ty
    gate, up = a.to(dtype).to(gl.float32), b.to(dtype).to(gl.float32)
    away = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    value = (gate / (1.0 + gl.exp(away))).to(dtype).to(gl.float32) * up
    row = gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    at = first + gl.arange(0, block, layout=gl.SliceLayout(0, layout))
    gl.store(out + row[:, None] * inner + at[None, :], value.to(dtype), mask=row[:, None] < tokens)


@gluon.jit
def _qkv_rotary_kernel(
    x,
    weight,
    cosine,
    sine,
    out,
    tokens,
    heads: gl.constexpr,
    kv_heads: gl.constexpr,
    head_dim: gl.constexpr,
    rows: gl.constexpr,
    block: gl.constexpr,
    chunk: gl.constexpr,
    count: gl.constexpr,
    buffers: gl.constexpr,
):
    """out = rotated queries [T, heads, head_dim], then rotated keys and values [T, kv_heads, head_dim].

    Grid: (pairs of blocks of outputs,): a block in the first half of a head and its counterpart in the
    second half.
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
    # Kind of the head (0 query, 1 key, 2 value), heads before that kind, and heads of that kind.
    which = (head >= heads).to(gl.int32) + (head >= heads + kv_heads).to(gl.int32)
    before = (which > 0).to(gl.int32) * heads + (which > 1).to(gl.int32) * kv_heads
    across = heads + (which > 0).to(gl.int32) * (kv_heads - heads)
    into = out + (tokens * before + head - before) * head_dim + row[:, None] * (across * head_dim) + at[None, :]
    gl.store(into, (one * c - two * s).to(dtype), mask=inside)
    gl.store(into + half, (two * c + one * s).to(dtype), mask=inside)


def supports(x: Tensor, inner: int, across: int, head_dim: int) -> bool:
    """Whether the kernels support a block: few rows in half precision on Hopper, and sizes that tiles
    divide.

    x: [T, width]; inner: hidden width of the MLP; across: heads times head_dim.
    """
    if not x.is_cuda or not 0 < x.shape[0] <= ROWS or x.dtype not in _DTYPES or not x.is_contiguous():
        return False
    width = x.shape[1]
    fits = width % CHUNK == 0 and width <= WIDEST
    return fits and across % SLICE == 0 and inner % SLICE == 0 and head_dim % 32 == 0 and is_hopper(x.device)


def qkv_rotary(
    x: Tensor, weight: Tensor, rotation: Rotation, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries, rotated keys, and values. weight: [(heads + 2 * kv_heads) * head_dim,
    inputs].

    x: [T, inputs]; rotation: cosine and sine, float32 [T, 1, head_dim]. Returns queries [T, heads, head_dim], keys and
    values [T, kv_heads, head_dim].
    """
    (tokens, inputs), head_dim, block = x.shape, rotation[0].shape[-1], 16
    count = inputs // CHUNK
    out = torch.empty(tokens * weight.shape[0], dtype=x.dtype, device=x.device)
    _qkv_rotary_kernel[(weight.shape[0] // (2 * block),)](
        _tiles(x, ROWS, CHUNK),
        _tiles(weight, block, CHUNK),
        *rotation,
        out,
        tokens,
        heads,
        kv_heads,
        head_dim,
        rows=ROWS,
        block=block,
        chunk=CHUNK,
        count=count,
        buffers=count,
        num_warps=WARPS,
        launch_pdl=True,
    )
    sizes = [tokens * number * head_dim for number in (heads, kv_heads, kv_heads)]
    query, key, value = (part.view(tokens, -1, head_dim) for part in out.split(sizes))
    return query, key, value


def gate_up_gelu(x: Tensor, weight: Tensor) -> Tensor:
    """Return gelu(x @ gate.T) * (x @ up.T), tanh form, [T, inner]. weight: [2 * inner, inputs], gate first."""
    (tokens, inputs), inner, block = x.shape, weight.shape[0] // 2, 32
    count = inputs // CHUNK
    out = torch.empty((tokens, inner), dtype=x.dtype, device=x.device)
    _gate_up_gelu_kernel[(inner // block,)](
        _tiles(x, ROWS, CHUNK),
        _tiles(weight, block, CHUNK),
        out,
        tokens,
        inner,
        rows=ROWS,
        block=block,
        chunk=CHUNK,
        count=count,
        buffers=min(count, 5),
        num_warps=WARPS,
        launch_pdl=True,
    )
    return out


def split_k(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T as slices to be summed: float32 [S, T, outputs]. x: [T, inputs]."""
    (tokens, inputs), outputs, block = x.shape, weight.shape[0], 64
    size = SLICE if inputs > 4 * SLICE else SLICE // 2
    out = torch.empty((inputs // size, tokens, outputs), dtype=torch.float32, device=x.device)
    _split_k_kernel[(outputs // block, inputs // size)](
        _tiles(x, ROWS, CHUNK),
        _tiles(weight, block, CHUNK),
        out,
        tokens,
        outputs,
        rows=ROWS,
        block=block,
        chunk=CHUNK,
        count=size // CHUNK,
        buffers=size // CHUNK,
        num_warps=WARPS,
        launch_pdl=True,
    )
    return out


def _tiles(matrix: Tensor, lines: int, chunk: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([lines, chunk], _DTYPES[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, [lines, chunk], layout)
