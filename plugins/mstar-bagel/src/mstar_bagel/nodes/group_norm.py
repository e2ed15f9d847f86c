"""Triton kernels of group normalization for images of one or many groups of millions of values.

PyTorch's kernel computes the moments of a group in one block: 32 blocks for a whole image. Here many programs share a
group. Moments are merged in a fixed order, so equal inputs give equal bits. Used by the autoencoder on CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor, nn

PARTS: Final = 32
"""Programs that share the moments of a group."""

BLOCK: Final = 4096
"""Values per iteration of a program."""


@triton.jit
def _moments_kernel(x, means, squares, size, each, block: tl.constexpr, overlaps: tl.constexpr):
    """Program: (group, part). Store the mean of a part and the sum of squared differences from it."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    group = tl.program_id(0)
    begin = tl.program_id(1) * each
    stop = tl.minimum(begin + each, size)
    source = x + group.to(tl.int64) * size
    mean = 0.0
    square = 0.0
    seen = 0.0
    for start in range(begin, stop, block):
        at = start + tl.arange(0, block)
        inside = at < stop
        value = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        count = tl.minimum(stop - start, block).to(tl.float32)
        own = tl.sum(value, axis=0) / count
        away = tl.where(inside, value - own, 0.0)
        apart = own - mean
        total = seen + count
        square += tl.sum(away * away, axis=0) + apart * apart * (seen * count / total)
        mean += apart * (count / total)
        seen = total
    place = group * tl.num_programs(1) + tl.program_id(1)
    tl.store(means + place, mean)
    tl.store(squares + place, square)


@triton.jit
def _normalize_kernel(
    x,
    means,
    squares,
    gain,
    shift,
    out,
    size,
    each,
    plane,
    per_group,
    groups,
    eps,
    parts: tl.constexpr,
    block: tl.constexpr,
    is_even: tl.constexpr,
    is_active: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: (group, block of its values). per_group: channels of a group; plane: values of a channel.

    is_even: whether a block has values of one channel only.
    """
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    group = tl.program_id(0)
    part = tl.arange(0, parts)
    count = tl.maximum(tl.minimum(size - part * each, each), 0).to(tl.float32)
    own = tl.load(means + group * parts + part)
    mean = tl.sum(own * (count / size), axis=0)
    square = tl.load(squares + group * parts + part) + count * (own - mean) * (own - mean)
    scale = tl.rsqrt(tl.sum(square, axis=0) / size + eps)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    place = group.to(tl.int64) * size + at
    first = (group % groups) * per_group
    if is_even:
        channel = first + tl.program_id(1) * block // plane
        factor = tl.load(gain + channel).to(tl.float32)
        offset = tl.load(shift + channel).to(tl.float32)
    else:
        factor = tl.load(gain + first + at // plane, mask=inside, other=0.0).to(tl.float32)
        offset = tl.load(shift + first + at // plane, mask=inside, other=0.0).to(tl.float32)
    made = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean) * scale * factor + offset
    if is_active:
        made = made / (1.0 + tl.exp(-made))
    tl.store(out + place, made.to(out.dtype.element_ty), mask=inside)


def group_norm(x: Tensor, norm: nn.GroupNorm, *, is_active: bool) -> Tensor:
    """Return the norm of x, or the SiLU of it if `is_active`. x: [N, channels, y, x], contiguous.

    Statistics are float32. Source of the merged moments: Chan, Golub and LeVeque, 1979.
    """
    images, channels, height, width = x.shape
    plane, per_group = height * width, channels // norm.num_groups
    size, rows = plane * per_group, images * norm.num_groups
    part_size = triton.cdiv(triton.cdiv(size, PARTS), BLOCK) * BLOCK
    means, squares = torch.empty((2, rows, PARTS), dtype=torch.float32, device=x.device).unbind()
    out, options = torch.empty_like(x), launch_options(x.device)
    _moments_kernel[(rows, PARTS)](x, means, squares, size, part_size, block=BLOCK, num_warps=8, **options)
    _normalize_kernel[(rows, triton.cdiv(size, BLOCK))](
        x,
        means,
        squares,
        norm.weight,
        norm.bias,
        out,
        size,
        part_size,
        plane,
        per_group,
        norm.num_groups,
        norm.eps,
        parts=PARTS,
        block=BLOCK,
        is_even=plane % BLOCK == 0,
        is_active=is_active,
        num_warps=8,
        **options,
    )
    return out
