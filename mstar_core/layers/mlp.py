"""Gated feed-forward block. Used by model plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from mstar_core.layers.linear import (
    activate,
    concatenate_weights,
    project_gated,
    project_partial,
    sum_partials,
    uses_fused_kernels,
    weight_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.linear import Activation, LinearWeight


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)). Parameters are named as in Llama."""

    def __init__(self, width: int, inner: int, *, bias: bool = False, activation: Activation = "silu") -> None:
        super().__init__()
        self._activation: Activation = activation
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self._fused: LinearWeight | None = None

    def fuse_projections(self) -> bool:
        """Fuse the gate and up projections once. Returns whether they are fused."""
        if self._fused is None:
            self._fused = concatenate_weights([self.gate_proj, self.up_proj])
        return self._fused is not None

    @property
    def fused_weight(self) -> LinearWeight | None:
        """The fused gate and up weight; None before `fuse_projections`."""
        return self._fused

    def unfuse(self) -> bool:
        """Drop the fused weight; the projections keep their views of it. Returns whether there was one."""
        fused, self._fused = self._fused, None
        return fused is not None

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape. x: [T, width]."""
        return sum_partials(self.branch(x), x)

    def branch(self, x: Tensor) -> Tensor:
        """Return the same, or the partial sums of the last projection: see `linear.project_partial`."""
        if self._fused is not None and uses_fused_kernels(x):
            inner = project_gated(x, self._fused, self._activation)
        else:
            inner = activate(self.gate_proj(x), self._activation) * self.up_proj(x)
        weight = weight_of(self.down_proj)
        if weight is not None and inner.dim() == 2:
            return project_partial(inner, weight)
        out: Tensor = self.down_proj(inner)
        return out
