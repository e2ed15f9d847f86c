"""Triton kernels of the vocoder on CUDA. Imported when a CUDA tensor meets them; needs triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _snake_kernel(x, alpha, out, channels, length, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < length
    slope = tl.load(alpha + row % channels)
    value = tl.load(x + row * length + at, mask=inside, other=0.0)
    wave = tl.sin(slope * value)
    tl.store(out + row * length + at, value + tl.div_rn(wave * wave, slope + 1e-9), mask=inside)


def snake(x: Tensor, alpha: Tensor) -> Tensor:
    """x + sin(alpha x)**2 / alpha in one pass. x: float32 [B, channels, T], contiguous; alpha: [1, channels, 1]."""
    out = torch.empty_like(x)
    rows, channels, length = x.shape
    block = 1024
    grid = (rows * channels, triton.cdiv(length, block))
    _snake_kernel[grid](x, alpha, out, channels, length, block=block)
    return out
