"""Kernels of the image tower on CUDA: a sum with its norm, and attention in float32. Used by `siglip`; needs triton.

torch attends in float32 by ordinary multiplications. Here a product is three of TF32 (`tf32x3`), which is as exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.fused import launch, warps

if TYPE_CHECKING:
    from torch import Tensor, nn

BLOCK: Final = 64
"""Patches of one program."""

KEYS: Final = 64
"""Patches of one pass of the inner loop."""

NARROWEST: Final = 16
"""Values of a head that a product of tensor cores takes at least: narrower heads are torch's."""


@triton.jit
def _see_kernel(
    query, key, value, out, scale, tokens, image_stride, row_stride, width,
    head_dim: tl.constexpr, whole: tl.constexpr, rest: tl.constexpr, block: tl.constexpr, keys: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2).to(tl.int64) * image_stride
    head = tl.program_id(1) * head_dim
    token = tl.program_id(0) * block + tl.arange(0, block)
    at = tl.arange(0, whole)[None, :]
    # What is left of a head beyond a power of two is a product of its own.
    behind = whole + tl.arange(0, rest)[None, :]
    inside = (token < tokens)[:, None]
    has = behind < head_dim
    line = image + token.to(tl.int64)[:, None] * row_stride + head
    q = tl.load(query + line + at, mask=inside, other=0.0)
    q_rest = tl.load(query + line + behind, mask=inside & has, other=0.0)
    top = tl.full((block,), -1.0e30, tl.float32)
    total = tl.zeros((block,), tl.float32)
    mixed = tl.zeros((block, whole), tl.float32)
    mixed_rest = tl.zeros((block, rest), tl.float32)
    for begin in range(0, tokens, keys):
        place = begin + tl.arange(0, keys)
        known = place < tokens
        seen = known[:, None]
        start = image + place.to(tl.int64)[:, None] * row_stride + head
        k = tl.load(key + start + at, mask=seen, other=0.0)
        k_rest = tl.load(key + start + behind, mask=seen & has, other=0.0)
        score = tl.dot(q_rest, k_rest.T, input_precision=precision)
        score = tl.dot(q, k.T, score, input_precision=precision) * scale
        score = tl.where(known[None, :], score, -1.0e30)
        higher = tl.maximum(top, tl.max(score, axis=1))
        share = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(share, axis=1)
        v = tl.load(value + start + at, mask=seen, other=0.0)
        v_rest = tl.load(value + start + behind, mask=seen & has, other=0.0)
        mixed = tl.dot(share, v, mixed * shrink[:, None], input_precision=precision)
        mixed_rest = tl.dot(share, v_rest, mixed_rest * shrink[:, None], input_precision=precision)
        top = higher
    into = out + (tl.program_id(2).to(tl.int64) * tokens + token[:, None]) * width + head
    tl.store(into + at, mixed / total[:, None], mask=inside)
    tl.store(into + behind, mixed_rest / total[:, None], mask=inside & has)


@triton.jit
def _sum_norm_kernel(
    x, branch, gain, shift, summed, out, width, eps, block: tl.constexpr, overlaps: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    factor = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(shift + at, mask=inside, other=0.0).to(tl.float32)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(branch + row * width + at, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(summed.dtype.element_ty)
    tl.store(summed + row * width + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    tl.store(out + row * width + at, (centred * scale * factor + offset).to(out.dtype.element_ty), mask=inside)


def sum_norm(x: Tensor, branch: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """x + branch, and its norm; statistics in float32. x, branch: [..., width], contiguous. Returns x's shape twice."""
    width, summed, out = x.shape[-1], torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _sum_norm_kernel[(x.numel() // width,)](
        x, branch, norm.weight, norm.bias, summed, out, width, norm.eps, block=block, num_warps=warps(block),
        **launch(x.device),
    )  # fmt: skip
    return summed, out


def see(packed: Tensor, heads: int) -> Tensor:
    """Attention of the patches of each image among each other.

    packed: float32 [N, tokens, 3 * width], queries, keys and values, contiguous; heads of NARROWEST values or more.
    Returns [N, tokens, width].
    """
    images, tokens, across = packed.shape
    width = across // 3
    head_dim = width // heads
    whole = 1 << (head_dim.bit_length() - 1)
    out = packed.new_empty((images, tokens, width))
    query, key, value = packed.chunk(3, dim=-1)
    _see_kernel[(triton.cdiv(tokens, BLOCK), heads, images)](
        query, key, value, out, head_dim**-0.5 * 1.4426950408889634, tokens, packed.stride(0), packed.stride(1), width,
        head_dim=head_dim, whole=whole, rest=max(16, triton.next_power_of_2(head_dim - whole)), block=BLOCK, keys=KEYS,
        precision="tf32x3", num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
