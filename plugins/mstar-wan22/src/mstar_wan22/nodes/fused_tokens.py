"""Triton kernels of the element-wise parts of a transformer block, one program per token. Used by `token_kernels`.

Used on CUDA in half precision: in plain torch each part writes and reads several float32 copies of all tokens.
Statistics and products are float32, and values are rounded where the torch functions round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from mstar_core.layers.kernels.launch import warps_for

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _table_row(table, row, tokens, first, batch_stride, span_stride):
    """Return the table's row of a token. The first `first` of `tokens` tokens of each video belong to span 0."""
    is_later = ((row % tokens) >= first).to(tl.int64)
    return table + (row // tokens) * batch_stride + is_later * span_stride


@triton.jit
def _modulate_kernel(
    x,
    shift,
    scale,
    out,
    tokens,
    first,
    shift_batch,
    shift_span,
    scale_batch,
    scale_span,
    width,
    eps,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    factor = tl.load(_table_row(scale, row, tokens, first, scale_batch, scale_span) + at, mask=inside, other=0.0)
    offset = tl.load(_table_row(shift, row, tokens, first, shift_batch, shift_span) + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, (normed * (1.0 + factor) + offset).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(x, change, gate, out, tokens, first, gate_batch, gate_span, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    factor = tl.load(_table_row(gate, row, tokens, first, gate_batch, gate_span) + at, mask=inside, other=0.0)
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(change + row * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (value + added * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn_kernel(x, weight, cosines, sines, out, tokens, pairs, head_pairs, eps, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < pairs
    start = x + row * 2 * pairs + 2 * at
    even = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(start + 1, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(even * even + odd * odd, axis=0) / (2 * pairs) + eps)
    dtype = out.dtype.element_ty
    even = (even * scale * tl.load(weight + 2 * at, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    odd = (odd * scale * tl.load(weight + 2 * at + 1, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    angle = (row % tokens) * head_pairs + at % head_pairs
    cosine = tl.load(cosines + angle, mask=inside, other=0.0)
    sine = tl.load(sines + angle, mask=inside, other=0.0)
    end = out + row * 2 * pairs + 2 * at
    tl.store(end, (even * cosine - odd * sine).to(dtype), mask=inside)
    tl.store(end + 1, (even * sine + odd * cosine).to(dtype), mask=inside)


def modulated(x: Tensor, shift: Tensor, scale: Tensor, first: int, eps: float) -> Tensor:
    """Return LN(x) * (1 + scale) + shift. x: [B, n, width]; shift, scale: float32 [B, spans, width], at most two spans.

    first: tokens of the first span. The last dimension of each tensor is contiguous.
    """
    out = torch.empty_like(x)
    strides = (shift.stride(0), _span_stride(shift), scale.stride(0), _span_stride(scale))
    _modulate_kernel[_rows(x)](
        x, shift, scale, out, x.shape[1], first, *strides, x.shape[2], eps, **_options(x.shape[2])
    )
    return out


def add_gated(x: Tensor, change: Tensor, gate: Tensor, first: int) -> Tensor:
    """Return x + gate * change, [B, n, width]. gate: float32 [B, spans, width], see `modulated`."""
    out = torch.empty_like(x)
    strides = (gate.stride(0), _span_stride(gate))
    _gate_kernel[_rows(x)](x, change, gate, out, x.shape[1], first, *strides, x.shape[2], **_options(x.shape[2]))
    return out


def turned(x: Tensor, weight: Tensor, cosines: Tensor, sines: Tensor, heads: int, eps: float) -> Tensor:
    """Return the RMS norm over the whole width, then heads turned by their positions: [B, n, heads, head_dim].

    x: [B, n, width], contiguous. cosines, sines: float32 [n, head_dim / 2], contiguous, of adjacent pairs of values.
    """
    out, pairs = torch.empty_like(x), x.shape[2] // 2
    _turn_kernel[_rows(x)](x, weight, cosines, sines, out, x.shape[1], pairs, pairs // heads, eps, **_options(pairs))
    apart: Tensor = out.unflatten(-1, (heads, -1))
    return apart


def _rows(x: Tensor) -> tuple[int]:
    return (x.shape[0] * x.shape[1],)


def _span_stride(table: Tensor) -> int:
    return table.stride(1) if table.shape[1] > 1 else 0


def _options(width: int) -> dict[str, Any]:
    block = triton.next_power_of_2(width)
    return {"block": block, "num_warps": warps_for(block)}
