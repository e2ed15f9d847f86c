"""Triton GEMMs for few rows (small M), which run at memory bandwidth. Called through `linear`.

Weights are [outputs, inputs] in bfloat16 or float16, or in float8 e4m3 with one float32 scale per output. Every sum has
a fixed order, so equal inputs give equal bits.

Cost model: bytes of the weights over the memory bandwidth. A program computes `block` outputs of one split of the
inputs and keeps `stages` weight tiles in flight. Programs start while the previous kernel still runs (programmatic
dependent launch) and prefetch their first weights; they wait only for activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.kernels.elementwise import activation
from mstar_core.layers.kernels.launch import prefetch_l2

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTiling:
    """Tiling of one GEMM: `block` outputs by `step` inputs per tile, `stages` tiles in flight.

    splits: split-K factor. prefetch_bytes: of each output's weights, prefetched before the activations arrive.
    """

    block: int
    step: int
    stages: int
    warps: int = 4
    splits: int = 1
    prefetch_bytes: int = 0


@triton.jit
def _product(
    x,
    weight,
    output,
    start,
    slice_size,
    rows,
    inputs,
    ahead,
    block_rows: tl.constexpr,
    step: tl.constexpr,
    overlaps: tl.constexpr,
    asks: tl.constexpr,
    stages: tl.constexpr,
):
    """Return weight[output] @ x.T over inputs [start, start + slice_size): float32 [len(output), block_rows]."""
    row = tl.arange(0, block_rows)
    lines = weight + output.to(tl.int64) * inputs + start
    if overlaps:
        gdc_launch_dependents()
        if asks:
            prefetch_l2(lines, ahead)
        gdc_wait()
    at = tl.arange(0, step)
    w_at = lines[:, None] + at[None, :]
    x_at = x + row[:, None] * inputs + start + at[None, :]
    total = tl.zeros((output.shape[0], block_rows), dtype=tl.float32)
    for _ in tl.range(0, slice_size, step, num_stages=stages):
        tile = tl.load(w_at)
        if tile.dtype.primitive_bitwidth == 8:
            # As exact as the direct conversion, which needs a slow instruction per value.
            tile = tile.to(tl.float16).to(tl.float32)
        given = tl.load(x_at, mask=row[:, None] < rows, other=0.0)
        total = tl.dot(tile.to(x.dtype.element_ty), given.T, total)
        w_at += step
        x_at += step
    return total


@triton.jit
def gemm_kernel(
    x,
    weight,
    scale,
    out,
    rows,
    outputs,
    inputs,
    slice_size,
    ahead,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    step: tl.constexpr,
    has_scale: tl.constexpr,
    overlaps: tl.constexpr,
    asks: tl.constexpr,
    stages: tl.constexpr,
):
    """Compute out[part, row, output], the product over one split of the inputs. Grid: (blocks of outputs, splits)."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    part = tl.program_id(1)
    # Outputs past the end read the last weights again. Their results are not stored.
    output = tl.minimum(at, outputs - 1)
    start = part * slice_size
    size = tl.minimum(slice_size, inputs - start)
    total = _product(x, weight, output, start, size, rows, inputs, ahead, block_rows, step, overlaps, asks, stages)
    if has_scale:
        total *= tl.load(scale + output)[:, None]
    row = tl.arange(0, block_rows)
    into = out + (part * rows + row[None, :]).to(tl.int64) * outputs + at[:, None]
    tl.store(into, total.to(out.dtype.element_ty), mask=(at[:, None] < outputs) & (row[None, :] < rows))


@triton.jit
def gated_gemm_kernel(
    x,
    weight,
    scale,
    out,
    rows,
    inner,
    inputs,
    slice_size,
    ahead,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    step: tl.constexpr,
    has_scale: tl.constexpr,
    overlaps: tl.constexpr,
    asks: tl.constexpr,
    stages: tl.constexpr,
    is_gelu: tl.constexpr,
):
    """Compute act(gate) * up of one weight [2 * inner, inputs], gate rows first. Grid: (blocks of inner,).

    A program reads half a block of gate rows and the matching half block of up rows.
    """
    half: tl.constexpr = block // 2
    first = tl.program_id(0) * half
    lane = tl.arange(0, block)
    output = tl.minimum(first + lane % half, inner - 1) + (lane // half) * inner
    total = _product(x, weight, output, 0, slice_size, rows, inputs, ahead, block_rows, step, overlaps, asks, stages)
    if has_scale:
        total *= tl.load(scale + output)[:, None]
    # Rounded where separate layers would round.
    pair = total.to(out.dtype.element_ty).to(tl.float32)
    gate, up = tl.split(pair.reshape(2, half, block_rows).permute(1, 2, 0))
    activated = activation(gate, out.dtype.element_ty, is_gelu)
    at = first + tl.arange(0, half)
    row = tl.arange(0, block_rows)
    into = out + row[None, :].to(tl.int64) * inner + at[:, None]
    tl.store(into, (activated * up).to(out.dtype.element_ty), mask=(at[:, None] < inner) & (row[None, :] < rows))


def gemm_partials(
    x: Tensor, weight: Tensor, scale: Tensor | None, tiling: GemmTiling, *, overlaps: bool = True
) -> Tensor:
    """Return x @ weight.T as partial sums: float32 [splits, T, outputs], or x's dtype [1, T, outputs] without split-K.

    x: [T, inputs], contiguous; weight: [outputs, inputs]; scale: float32 [outputs]. inputs is a multiple of the step.
    """
    rows, inputs, outputs = x.shape[0], x.shape[1], weight.shape[0]
    slice_size = triton.cdiv(triton.cdiv(inputs, tiling.splits), tiling.step) * tiling.step
    count = triton.cdiv(inputs, slice_size)
    out = torch.empty((count, rows, outputs), dtype=torch.float32 if count > 1 else x.dtype, device=x.device)
    shortest = (inputs - (count - 1) * slice_size) * weight.element_size()
    gemm_kernel[(triton.cdiv(outputs, tiling.block), count)](
        x,
        weight,
        scale,
        out,
        rows,
        outputs,
        inputs,
        slice_size,
        min(tiling.prefetch_bytes, shortest),
        block_rows=padded_rows(rows),
        block=tiling.block,
        step=tiling.step,
        has_scale=scale is not None,
        overlaps=overlaps,
        asks=overlaps and tiling.prefetch_bytes > 0,
        stages=tiling.stages,
        num_warps=tiling.warps,
        **_launch(overlaps),
    )
    return out


def gated_gemm(
    x: Tensor, weight: Tensor, scale: Tensor | None, tiling: GemmTiling, *, overlaps: bool = True, is_gelu: bool = False
) -> Tensor:
    """Return silu(x @ gate.T) * (x @ up.T): [T, inner] in x's dtype. weight: [2 * inner, inputs], gate first.

    is_gelu: the tanh form of GELU instead of SiLU.
    """
    rows, inputs, inner = x.shape[0], x.shape[1], weight.shape[0] // 2
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    gated_gemm_kernel[(triton.cdiv(inner, tiling.block // 2),)](
        x,
        weight,
        scale,
        out,
        rows,
        inner,
        inputs,
        inputs,
        min(tiling.prefetch_bytes, inputs * weight.element_size()),
        block_rows=padded_rows(rows),
        block=tiling.block,
        step=tiling.step,
        has_scale=scale is not None,
        overlaps=overlaps,
        asks=overlaps and tiling.prefetch_bytes > 0,
        stages=tiling.stages,
        is_gelu=is_gelu,
        num_warps=tiling.warps,
        **_launch(overlaps),
    )
    return out


def padded_rows(rows: int) -> int:
    """Return the rows, padded to the size that the kernels are compiled for."""
    return max(16, 1 << (rows - 1).bit_length())


def _launch(overlaps: bool) -> dict[str, bool]:
    # The interpreter does not have this option.
    return {"launch_pdl": True} if overlaps else {}
