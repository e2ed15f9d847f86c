"""The image tower's own kernel on CUDA: a sum with its norm. Used by `siglip`; needs triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.fused import launch, warps

if TYPE_CHECKING:
    from torch import Tensor, nn


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
