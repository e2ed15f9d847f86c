"""A residual sum and the LayerNorm of it as one Triton kernel. Used on CUDA by towers of plugins; needs triton."""

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
    x, branch, bias, gain, shift, summed, out, width, eps,
    parts: tl.constexpr, has_bias: tl.constexpr, block: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    factor = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(shift + at, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros((block,), tl.float32)
    if has_bias:
        added = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if parts > 0:
        stride = tl.num_programs(0).to(tl.int64) * width
        for part in tl.static_range(parts):
            added += tl.load(branch + part * stride + row * width + at, mask=inside, other=0.0).to(tl.float32)
        # As the layer that made the branch would have rounded it.
        rounded = (value + added.to(summed.dtype.element_ty).to(tl.float32)).to(summed.dtype.element_ty)
        tl.store(summed + row * width + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    tl.store(out + row * width + at, (centred * scale * factor + offset).to(out.dtype.element_ty), mask=inside)


def sum_norm(x: Tensor, branch: Tensor | None, norm: nn.LayerNorm, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x + branch (+ bias), and its norm, statistics in float32. Without a branch the sum is x itself.

    x: [..., width]; branch: the same, or float32 slices to be summed [S, ..., width]; contiguous. Returns both in x's
    shape and dtype.
    """
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    out = torch.empty_like(x)
    parts = 0 if branch is None else branch.shape[0] if branch.dim() > x.dim() else 1
    summed = x if branch is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _sum_norm_kernel[(rows,)](
        x, x if branch is None else branch, norm.bias if bias is None else bias, norm.weight, norm.bias, summed, out,
        width, norm.eps, parts=parts, has_bias=bias is not None, block=block, num_warps=warps(block, rows),
        **launch(x.device),
    )  # fmt: skip
    return summed, out
