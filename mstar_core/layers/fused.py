"""Triton kernels behind the layers on CUDA in half precision: norms, rotation, gated activation.

Called by the layers where `applies` says so; importing this needs triton, which every CUDA build of torch brings.
Statistics and products are computed in float32 and rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _norm_kernel(x, branch, weight, summed, out, width, eps, has_branch: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if has_branch:
        value += tl.load(branch + row * width + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(summed.dtype.element_ty)
        tl.store(summed + row * width + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (normed * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(pair, out, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    gate = tl.load(pair + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pair + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (opened * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(
    source, cosine, sine, query, key, row_stride, heads, kv_heads, width, head_dim: tl.constexpr, half: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, half)
    inside = at < width // 2
    start = source + row * row_stride + head * head_dim
    first = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + width // 2 + at, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cosine + row * width + at, mask=inside, other=0.0)
    s = tl.load(sine + row * width + at, mask=inside, other=0.0)
    is_query = head < heads
    into = tl.where(is_query, query + (row * heads + head) * head_dim, key + (row * kv_heads + head - heads) * head_dim)
    tl.store(into + at, (first * c - second * s).to(query.dtype.element_ty), mask=inside)
    tl.store(into + width // 2 + at, (second * c + first * s).to(query.dtype.element_ty), mask=inside)


def applies(x: Tensor) -> bool:
    """Whether these kernels take the place of the plain operations for `x`."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.dim() == 2 and x.is_contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. x: [T, width], contiguous."""
    out = torch.empty_like(x)
    rows, width = x.shape
    _norm_kernel[(rows,)](x, x, weight, x, out, width, eps, has_branch=False, block=triton.next_power_of_2(width))
    return out


def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + branch, and its norm. x, branch: [T, width], contiguous."""
    summed, out = torch.empty_like(x), torch.empty_like(x)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](x, branch, weight, summed, out, width, eps, has_branch=True, block=block)
    return summed, out


def gated_silu(pair: Tensor) -> Tensor:
    """silu(gate) * up of pair [T, 2 * width], gate first. Returns [T, width]."""
    rows, width = pair.shape[0], pair.shape[1] // 2
    out = torch.empty((rows, width), dtype=pair.dtype, device=pair.device)
    block = 1024
    _gate_kernel[(rows, triton.cdiv(width, block))](pair, out, width, block=block)
    return out


def rotate_pair(
    packed: Tensor, heads: int, kv_heads: int, head_dim: int, cosine: Tensor, sine: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys of packed projections, whole heads.

    packed: [T, (heads + at least kv_heads) * head_dim], queries first; cosine, sine: float32 [T, 1, head_dim].
    Returns queries [T, heads, head_dim] and keys [T, kv_heads, head_dim].
    """
    rows = packed.shape[0]
    query = torch.empty((rows, heads, head_dim), dtype=packed.dtype, device=packed.device)
    key = torch.empty((rows, kv_heads, head_dim), dtype=packed.dtype, device=packed.device)
    half = triton.next_power_of_2(head_dim // 2)
    _rotate_kernel[(rows, heads + kv_heads)](
        packed, cosine, sine, query, key, packed.stride(0), heads, kv_heads, head_dim, head_dim=head_dim, half=half
    )
    return query, key
