"""Root-mean-square norm. Used by model plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from mstar_core.layers.linear import elementwise_kernels, sum_partials, uses_fused_kernels

if TYPE_CHECKING:
    from torch import Tensor


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; statistics in float32, result in the input's dtype."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and uses_fused_kernels(x):
            fused: Tensor = elementwise_kernels().rms_norm(x, self.weight, self.eps)
            return fused
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)

    def after_add(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + branch and its norm. branch: x's shape, or partial sums of it: see `linear.project_partial`."""
        if x.is_cuda and uses_fused_kernels(x):
            both: tuple[Tensor, Tensor] = elementwise_kernels().add_rms_norm(x, branch, self.weight, self.eps)
            return both
        total = x + sum_partials(branch, x)
        return total, self(total)
