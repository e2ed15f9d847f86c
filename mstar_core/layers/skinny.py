"""Triton kernels for linear layers over few rows, which read their weights at the rate of the memory.

Called through `matrix`, which knows for which rows they win. Weights are [outputs, inputs] in bfloat16 or float16, or
in float8 e4m3 with one float32 scale per output. Every sum has a fixed order, so the same inputs give the same bits.

Cost model: bytes of the weights over the memory's rate. A program owns `block` outputs and one slice of the inputs and
keeps `stages` tiles of weights on their way. Programs start while the kernel before them still runs (programmatic
dependent launch) and ask for their first weights then; only activations wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.fused import ask_for, opened

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a kernel cuts a matrix: `block` outputs by `step` inputs per tile, `stages` tiles on their way.

    splits: slices of the inputs, each summed on its own. ahead_bytes: of each output's weights, asked for before the
    activations are there.
    """

    block: int
    step: int
    stages: int
    warps: int = 4
    splits: int = 1
    ahead_bytes: int = 0


@triton.jit
def _product(
    x, weight, output, start, slice_size, rows, inputs, ahead, block_rows: tl.constexpr, step: tl.constexpr,
    overlaps: tl.constexpr, asks: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """weight[output] @ x.T over inputs [start, start + slice_size): float32 [len(output), block_rows]."""
    row = tl.arange(0, block_rows)
    lines = weight + output.to(tl.int64) * inputs + start
    if overlaps:
        gdc_launch_dependents()
        if asks:
            ask_for(lines, ahead)
        gdc_wait()
    at = tl.arange(0, step)
    w_at = lines[:, None] + at[None, :]
    x_at = x + row[:, None] * inputs + start + at[None, :]
    total = tl.zeros((output.shape[0], block_rows), dtype=tl.float32)
    for _ in tl.range(0, slice_size, step, num_stages=stages):
        tile = tl.load(w_at)
        if tile.dtype.primitive_bitwidth == 8:
            # Exact, as the direct conversion, which takes a slow instruction for every value.
            tile = tile.to(tl.float16).to(tl.float32)
        given = tl.load(x_at, mask=row[:, None] < rows, other=0.0)
        total = tl.dot(tile.to(x.dtype.element_ty), given.T, total)
        w_at += step
        x_at += step
    return total


@triton.jit
def parts_kernel(
    x, weight, scale, out, rows, outputs, inputs, slice_size, ahead,
    block_rows: tl.constexpr, block: tl.constexpr, step: tl.constexpr, has_scale: tl.constexpr,
    overlaps: tl.constexpr, asks: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """out[part, row, output] = the product over one slice of the inputs. Grid: (blocks of outputs, slices)."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    part = tl.program_id(1)
    # Outputs past the end read the last weights again; their results are not stored.
    output = tl.minimum(at, outputs - 1)
    start = part * slice_size
    size = tl.minimum(slice_size, inputs - start)
    total = _product(
        x, weight, output, start, size, rows, inputs, ahead, block_rows, step, overlaps, asks, stages
    )  # fmt: skip
    if has_scale:
        total *= tl.load(scale + output)[:, None]
    row = tl.arange(0, block_rows)
    into = out + (part * rows + row[None, :]).to(tl.int64) * outputs + at[:, None]
    tl.store(into, total.to(out.dtype.element_ty), mask=(at[:, None] < outputs) & (row[None, :] < rows))


@triton.jit
def gated_kernel(
    x, weight, scale, out, rows, inner, inputs, slice_size, ahead,
    block_rows: tl.constexpr, block: tl.constexpr, step: tl.constexpr, has_scale: tl.constexpr,
    overlaps: tl.constexpr, asks: tl.constexpr, stages: tl.constexpr, is_gelu: tl.constexpr,
):  # fmt: skip
    """out = act(gate) * up, of one weight [2 * inner, inputs] with the gate's rows first. Grid: (blocks of inner,).

    A program reads half a block of gate rows and the same half block of up rows.
    """
    half: tl.constexpr = block // 2
    first = tl.program_id(0) * half
    lane = tl.arange(0, block)
    output = tl.minimum(first + lane % half, inner - 1) + (lane // half) * inner
    total = _product(
        x, weight, output, 0, slice_size, rows, inputs, ahead, block_rows, step, overlaps, asks, stages
    )  # fmt: skip
    if has_scale:
        total *= tl.load(scale + output)[:, None]
    # Rounded where separate layers would round.
    pair = total.to(out.dtype.element_ty).to(tl.float32)
    gate, up = tl.split(pair.reshape(2, half, block_rows).permute(1, 2, 0))
    open_to = opened(gate, out.dtype.element_ty, is_gelu)
    at = first + tl.arange(0, half)
    row = tl.arange(0, block_rows)
    into = out + row[None, :].to(tl.int64) * inner + at[:, None]
    tl.store(into, (open_to * up).to(out.dtype.element_ty), mask=(at[:, None] < inner) & (row[None, :] < rows))


def parts(x: Tensor, weight: Tensor, scale: Tensor | None, shape: Shape, *, overlaps: bool = True) -> Tensor:
    """x @ weight.T in slices: float32 [splits, T, outputs], or x's dtype [1, T, outputs] where nothing is split.

    x: [T, inputs], contiguous; weight: [outputs, inputs]; scale: float32 [outputs]. inputs is a multiple of the step.
    """
    rows, inputs, outputs = x.shape[0], x.shape[1], weight.shape[0]
    slice_size = triton.cdiv(triton.cdiv(inputs, shape.splits), shape.step) * shape.step
    count = triton.cdiv(inputs, slice_size)
    out = torch.empty((count, rows, outputs), dtype=torch.float32 if count > 1 else x.dtype, device=x.device)
    shortest = (inputs - (count - 1) * slice_size) * weight.element_size()
    parts_kernel[(triton.cdiv(outputs, shape.block), count)](
        x, weight, scale, out, rows, outputs, inputs, slice_size, min(shape.ahead_bytes, shortest),
        block_rows=padded(rows), block=shape.block, step=shape.step, has_scale=scale is not None,
        overlaps=overlaps, asks=overlaps and shape.ahead_bytes > 0, stages=shape.stages,
        num_warps=shape.warps, **_launch(overlaps),
    )  # fmt: skip
    return out


def gated(
    x: Tensor, weight: Tensor, scale: Tensor | None, shape: Shape, *, overlaps: bool = True, is_gelu: bool = False
) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) of one weight [2 * inner, inputs], gate first. Returns [T, inner] in x's dtype.

    is_gelu: GELU in its tanh form instead of SiLU.
    """
    rows, inputs, inner = x.shape[0], x.shape[1], weight.shape[0] // 2
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    gated_kernel[(triton.cdiv(inner, shape.block // 2),)](
        x, weight, scale, out, rows, inner, inputs, inputs, min(shape.ahead_bytes, inputs * weight.element_size()),
        block_rows=padded(rows), block=shape.block, step=shape.step, has_scale=scale is not None,
        overlaps=overlaps, asks=overlaps and shape.ahead_bytes > 0, stages=shape.stages, is_gelu=is_gelu,
        num_warps=shape.warps, **_launch(overlaps),
    )  # fmt: skip
    return out


def padded(rows: int) -> int:
    """Rows that the kernels are compiled for, given the rows there are."""
    return max(16, 1 << (rows - 1).bit_length())


def _launch(overlaps: bool) -> dict[str, bool]:
    # The interpreter knows no such option.
    return {"launch_pdl": True} if overlaps else {}
