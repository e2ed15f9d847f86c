"""Triton kernel of the vision encoder's attention in half precision, for heads of 72 dimensions. Used by `vision`.

A head is a power of two and a rest, 64 and 8 here, as separate products: a width of 128 would waste two fifths of the
work. A new number of patches compiles nothing. Online softmax after Dao, FlashAttention-2, 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK: Final = 128
"""Query patches per program."""

KEYS: Final = 64
"""Key patches per iteration of the inner loop."""

NARROWEST: Final = 16
"""Least inner dimension of a product on tensor cores."""

_LOG2_E: Final = 1.4426950408889634


@triton.jit
def _attend_keys(
    q,
    q_rest,
    mixed,
    mixed_rest,
    top,
    total,
    key,
    value,
    key_stride,
    value_stride,
    begin,
    patches,
    scale,
    head_dim: tl.constexpr,
    whole: tl.constexpr,
    rest: tl.constexpr,
    keys: tl.constexpr,
):
    """Attend to one block of keys. Return the sums and maxima that it changes."""
    place = begin + tl.arange(0, keys)
    at = tl.arange(0, whole)
    behind = whole + tl.arange(0, rest)
    known = place < patches
    line = place.to(tl.int64)
    k = tl.load(key + line[None, :] * key_stride + at[:, None], mask=known[None, :], other=0.0)
    score = tl.dot(q, k)
    has = behind < head_dim
    if head_dim > whole:
        side = tl.load(
            key + line[None, :] * key_stride + behind[:, None], mask=known[None, :] & has[:, None], other=0.0
        )
        score = tl.dot(q_rest, side, score)
    score = tl.where(known[None, :], score * scale, -1.0e30)
    higher = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    weight = weight.to(q.dtype)
    v = tl.load(value + line[:, None] * value_stride + at[None, :], mask=known[:, None], other=0.0)
    mixed = tl.dot(weight, v, mixed * shrink[:, None])
    if head_dim > whole:
        v_rest = tl.load(
            value + line[:, None] * value_stride + behind[None, :], mask=known[:, None] & has[None, :], other=0.0
        )
        mixed_rest = tl.dot(weight, v_rest, mixed_rest * shrink[:, None])
    return mixed, mixed_rest, higher, total


@triton.jit(do_not_specialize=["patches"])
def attention_kernel(
    query,
    key,
    value,
    out,
    scale,
    patches,
    query_stride,
    key_stride,
    value_stride,
    head_dim: tl.constexpr,
    whole: tl.constexpr,
    rest: tl.constexpr,
    block: tl.constexpr,
    keys: tl.constexpr,
):
    """Attend among the patches of each frame, one program per block of queries, head and frame."""
    first = tl.program_id(2).to(tl.int64) * patches
    head, heads = tl.program_id(1), tl.num_programs(1)
    patch = tl.program_id(0) * block + tl.arange(0, block)
    at = tl.arange(0, whole)
    behind = whole + tl.arange(0, rest)
    inside, has = (patch < patches)[:, None], (behind < head_dim)[None, :]
    line = (first + patch)[:, None]
    mine = query + line * query_stride + head * head_dim
    q = tl.load(mine + at[None, :], mask=inside, other=0.0)
    q_rest = tl.load(mine + behind[None, :], mask=inside & has, other=0.0)
    key += first * key_stride + head * head_dim
    value += first * value_stride + head * head_dim
    top = tl.full((block,), -1.0e30, tl.float32)
    total = tl.zeros((block,), tl.float32)
    mixed = tl.zeros((block, whole), tl.float32)
    mixed_rest = tl.zeros((block, rest), tl.float32)
    # The last block has a mask like every other: with a copy of the body behind the loop, whose four accumulators it
    # continues, the compiled kernel was wrong on Hopper for head_dim > whole.
    for begin in range(0, patches, keys):
        mixed, mixed_rest, top, total = _attend_keys(
            q,
            q_rest,
            mixed,
            mixed_rest,
            top,
            total,
            key,
            value,
            key_stride,
            value_stride,
            begin,
            patches,
            scale,
            head_dim,
            whole,
            rest,
            keys,
        )
    into = out + line * (heads * head_dim) + head * head_dim
    tl.store(into + at[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
    if head_dim > whole:
        tl.store(into + behind[None, :], (mixed_rest / total[:, None]).to(out.dtype.element_ty), mask=inside & has)


def attention(query: Tensor, key: Tensor, value: Tensor, frames: int) -> Tensor:
    """Return attention among the patches of each frame: [frames * patches, heads * head_dim].

    query, key, value: half precision [frames * patches, heads, head_dim]; the heads of a patch are contiguous.
    """
    rows, heads, head_dim = query.shape
    patches, whole = rows // frames, 1 << (head_dim.bit_length() - 1)
    rest = max(NARROWEST, triton.next_power_of_2(head_dim - whole)) if head_dim > whole else NARROWEST
    out = torch.empty((rows, heads * head_dim), dtype=query.dtype, device=query.device)
    attention_kernel[(triton.cdiv(patches, BLOCK), heads, frames)](
        query,
        key,
        value,
        out,
        head_dim**-0.5 * _LOG2_E,
        patches,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        head_dim=head_dim,
        whole=whole,
        rest=rest,
        block=BLOCK,
        keys=KEYS,
        num_warps=8,
        num_stages=3,
    )
    return out
