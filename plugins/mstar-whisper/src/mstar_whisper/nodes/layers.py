"""Layers of Whisper: attention without rotary, biases except on keys, LayerNorm and GELU.

Modules are nested like the checkpoint's keys, so weight names need no mapping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.functional import gelu, linear

from mstar_core.layers.linear import join_with_biases

if TYPE_CHECKING:
    from torch import Tensor


class Projections(nn.Module):
    """Projections of one attention. x [..., width]; queries and the others as heads [..., heads, head_dim]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self._joined: tuple[Tensor, Tensor] | None = None

    def join(self) -> None:
        """Join the three input projections into one matrix multiplication. Called once the weights are loaded."""
        self._joined = join_with_biases([self.q_proj, self.k_proj, self.v_proj])

    def all_three(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the same input."""
        if self._joined is None:
            return self.queries(x), *self.keys_and_values(x)
        query, key, value = linear(x, *self._joined).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return query, key, value

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries."""
        queries: Tensor = self.q_proj(x).unflatten(-1, (self.heads, -1))
        return queries

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values."""
        return self.k_proj(x).unflatten(-1, (self.heads, -1)), self.v_proj(x).unflatten(-1, (self.heads, -1))

    def out(self, attended: Tensor) -> Tensor:
        """Return the output, [..., width]."""
        result: Tensor = self.out_proj(attended.flatten(-2))
        return result


class FeedForward(nn.Module):
    """Base of a layer: its MLP behind the last norm."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.final_layer_norm = nn.LayerNorm(width)

    def after_attention(self, x: Tensor) -> Tensor:
        """Return x with the MLP's output added."""
        result: Tensor = x + self.fc2(gelu(self.fc1(self.final_layer_norm(x))))
        return result
