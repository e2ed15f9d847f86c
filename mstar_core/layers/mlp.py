"""Gated feed-forward block. Used by model plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.functional import silu

if TYPE_CHECKING:
    from torch import Tensor


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with the parameter names of published Llama-like checkpoints."""

    def __init__(self, width: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out
