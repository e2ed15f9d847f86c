"""The rotation of queries and keys in one Triton kernel. Used by `rotary` on CUDA; importing it needs triton.

In plain torch it is some ten passes over float32 copies, which at 8,192 patches cost as much as half of the products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _turn_kernel(
    x, cosine, sine, out, token_stride, head_stride, places, heads, width,
    head_dim: tl.constexpr, pairs: tl.constexpr, some: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * some + tl.arange(0, some)
    pair = 2 * tl.arange(0, pairs)
    inside = (head < heads)[:, None] & (pair < head_dim)[None, :]
    start = x + token * token_stride + head[:, None] * head_stride + pair[None, :]
    first = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + 1, mask=inside, other=0.0).to(tl.float32)
    turns = pair < width
    row = (token % places) * width + pair
    # Both lanes of a pair have an angle of their own; lanes behind the last that turns keep what they hold.
    c0 = tl.load(cosine + row, mask=turns, other=1.0)[None, :]
    s0 = tl.load(sine + row, mask=turns, other=0.0)[None, :]
    c1 = tl.load(cosine + row + 1, mask=turns, other=1.0)[None, :]
    s1 = tl.load(sine + row + 1, mask=turns, other=0.0)[None, :]
    into = out + (token * heads + head[:, None]) * head_dim + pair[None, :]
    tl.store(into, (first * c0 - second * s0).to(out.dtype.element_ty), mask=inside)
    tl.store(into + 1, (second * c1 + first * s1).to(out.dtype.element_ty), mask=inside)


def is_taken(x: Tensor, cosine: Tensor) -> bool:
    """Whether the kernel knows this layout: tokens evenly apart, heads whole, angles shared by leading rows only."""
    even = all(x.stride(axis) == x.shape[axis + 1] * x.stride(axis + 1) for axis in range(x.dim() - 3))
    tokens = x.shape[:-2]
    shared = cosine.shape[:-2] == tokens[len(tokens) - (cosine.dim() - 2) :]
    return even and x.stride(-1) == 1 and x.shape[-1] % 2 == 0 and shared and cosine.is_contiguous()


def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """What `rotary.rotate` does. x: [..., T, heads, head_dim]; cosine, sine: float32 [..., T, 1, lanes], contiguous."""
    heads, head_dim = x.shape[-2:]
    tokens, width = x.shape[:-2].numel(), cosine.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    some = 8
    _turn_kernel[(tokens, triton.cdiv(heads, some))](
        x, cosine, sine, out, x.stride(-3), x.stride(-2), cosine.numel() // width, heads, width,
        head_dim=head_dim, pairs=triton.next_power_of_2(head_dim // 2), some=some, num_warps=4,
    )  # fmt: skip
    return out
