"""Gated feed-forward block. Used by model plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from mstar_core.layers.matrix import gated, matrix_of, opened, parts, summed
from mstar_core.layers.packing import is_fused, join

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.matrix import Activation, Matrix


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with the parameter names of published Llama-like checkpoints."""

    def __init__(self, width: int, inner: int, *, bias: bool = False, activation: Activation = "silu") -> None:
        super().__init__()
        self._activation: Activation = activation
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self._joined: Matrix | None = None

    def pack(self) -> bool:
        """Make gate and up one matrix, once; see `packing.pack`."""
        if self._joined is None:
            self._joined = join([self.gate_proj, self.up_proj])
        return self._joined is not None

    @property
    def joined(self) -> Matrix | None:
        """The gate and up as one matrix, once `pack` made it."""
        return self._joined

    def unpack(self) -> bool:
        """Forget the joined matrix, whose parts the projections still are. Returns whether there was one."""
        joined, self._joined = self._joined, None
        return joined is not None

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, width]. Returns the same shape."""
        return summed(self.branch(x), x)

    def branch(self, x: Tensor) -> Tensor:
        """The same, in slices where that is what the last projection leaves: see `matrix.parts`."""
        if self._joined is not None and is_fused(x):
            inner = gated(x, self._joined, self._activation)
        else:
            inner = opened(self.gate_proj(x), self._activation) * self.up_proj(x)
        matrix = matrix_of(self.down_proj)
        if matrix is not None and inner.dim() == 2:
            return parts(inner, matrix)
        out: Tensor = self.down_proj(inner)
        return out
