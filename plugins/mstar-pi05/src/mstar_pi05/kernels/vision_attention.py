"""Triton kernel of the image tower's float32 attention. Used on CUDA by `siglip`.

torch computes float32 attention without tensor cores. This kernel uses three TF32 products (`tf32x3`), which are as
accurate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK: Final = 64
"""Query patches per program."""

KEYS: Final = 64
"""Key patches per iteration of the inner loop."""

NARROWEST: Final = 16
"""Minimum head dimension of tensor-core products. torch computes narrower heads."""


@triton.jit
def _attention_kernel(
    query,
    key,
    value,
    out,
    scale,
    tokens,
    image_stride,
    row_stride,
    width,
    head_dim: tl.constexpr,
    whole: tl.constexpr,
    rest: tl.constexpr,
    block: tl.constexpr,
    keys: tl.constexpr,
    precision: tl.constexpr,
):
    image = tl.program_id(2).to(tl.int64) * image_stride
    head = tl.program_id(1) * head_dim
    token = tl.program_id(0) * block + tl.arange(0, block)
    at = tl.arange(0, whole)[None, :]
    # The lanes of a head beyond a power of two are a separate product.
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


def attention(packed: Tensor, heads: int) -> Tensor:
    """Compute attention among the patches of each image.

    packed: float32 [N, tokens, 3 * width], queries, keys and values, contiguous; heads of at least NARROWEST lanes.
    Returns [N, tokens, width].
    """
    images, tokens, across = packed.shape
    width = across // 3
    head_dim = width // heads
    whole = 1 << (head_dim.bit_length() - 1)
    out = packed.new_empty((images, tokens, width))
    query, key, value = packed.chunk(3, dim=-1)
    _attention_kernel[(triton.cdiv(tokens, BLOCK), heads, images)](
        query,
        key,
        value,
        out,
        head_dim**-0.5 * 1.4426950408889634,
        tokens,
        packed.stride(0),
        packed.stride(1),
        width,
        head_dim=head_dim,
        whole=whole,
        rest=max(16, triton.next_power_of_2(head_dim - whole)),
        block=BLOCK,
        keys=KEYS,
        precision="tf32x3",
        num_warps=4,
        num_stages=2,
    )
    return out
