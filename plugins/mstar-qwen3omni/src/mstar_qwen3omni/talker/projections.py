"""Projection MLPs that bring the thinker's vectors to the talker's width (specification section 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.functional import silu

from mstar_core.layers.linear import LinearWeight, project, uses_fused_kernels

if TYPE_CHECKING:
    from torch import Tensor


class Projection(nn.Module):
    """Linear, SiLU, Linear, both with bias. Parameters are named as in the checkpoint."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(inputs, inner)
        self.linear_fc2 = nn.Linear(inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, outputs]. x: [n, inputs]."""
        return _apply(self.linear_fc2, silu(_apply(self.linear_fc1, x)))


def _apply(layer: nn.Linear, x: Tensor) -> Tensor:
    if x.dim() == 2 and x.is_cuda and uses_fused_kernels(x):
        return project(x, LinearWeight(layer.weight)) + layer.bias
    out: Tensor = layer(x)
    return out
