"""Gated feed-forward block. Used by model plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.functional import linear, silu

from mstar_core.layers.packing import is_fused, join, kernels

if TYPE_CHECKING:
    from torch import Tensor


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with the parameter names of published Llama-like checkpoints."""

    def __init__(self, width: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self._joined: Tensor | None = None

    def pack(self) -> bool:
        """Make gate and up one matrix; see `packing.pack`."""
        self._joined = join([self.gate_proj, self.up_proj])
        return self._joined is not None

    def forward(self, x: Tensor) -> Tensor:
        if self._joined is not None and is_fused(x):
            fused: Tensor = self.down_proj(kernels().gated_silu(linear(x, self._joined)))
            return fused
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out
