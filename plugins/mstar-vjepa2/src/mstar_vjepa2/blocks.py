"""The pre-norm block that encoder, both predictors and the pooler are made of.

How queries meet keys is given to a block by its caller: over all tokens at once, or through the engine's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from mstar_vjepa2.rotary import Rotation, rotate

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_vjepa2.facts import VitFacts

Mix = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""Attention of query, key and value [..., T, heads, head_dim]; gives the query's shape."""


def attend_all(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every token sees every token. query: [B, Q, heads, head_dim]; key, value: [B, T, heads, head_dim]."""
    mixed = scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return mixed.transpose(1, 2)


class Attention(nn.Module):
    """Projections around attention; query, key and value come from one matrix, in this order."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, rotation: Rotation | None, mix: Mix) -> Tensor:
        """x: [..., T, width]. Returns x's shape."""
        joined = self.qkv(x).unflatten(-1, (3 * self.heads, -1))
        both, value = joined.split([2 * self.heads, self.heads], dim=-2)
        if rotation is not None:
            both = rotate(both, rotation)  # queries and keys are as many heads more to it
        query, key = both.chunk(2, dim=-2)
        out: Tensor = self.proj(mix(query, key, value).flatten(-2))
        return out


class Mlp(nn.Module):
    """Two linear layers around an exact GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., width]. Returns x's shape."""
        out: Tensor = self.fc2(gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps)
        self.mlp = Mlp(width, inner)

    def forward(self, x: Tensor, rotation: Rotation | None, mix: Mix = attend_all) -> Tensor:
        """x: [..., T, width]. Returns x's shape."""
        x = x + self.attn(self.norm1(x), rotation, mix)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def stack(facts: VitFacts) -> nn.ModuleList:
    """The blocks of one stack."""
    return nn.ModuleList(Block(facts.width, facts.heads, facts.inner, facts.eps) for _ in range(facts.layers))
