"""Pre-norm transformer block of the encoder, both predictors and the pooler.

The caller passes the attention function: over all tokens, or through the engine's KV cache. A block returns its last
branch separately, so that on CUDA the sum and the next norm are one kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from mstar_core.layers.kv_view import PlacedView
from mstar_vjepa2.nodes.linear import Branch, branch_of, linear, qkv_rotary
from mstar_vjepa2.nodes.rotary import Rotation, rotate

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import DenseKernel, KVView
    from mstar_vjepa2.checkpoint.config import VitConfig

Mix = Callable[["Tensor", nn.Linear, "Rotation | None", int], "Tensor"]
"""Attention of x [..., T, width] with the QKV layer and the number of heads. Returns x's shape."""


def attend_all(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend without a mask. query: [B, Q, heads, head_dim]; key, value: [B, T, heads, head_dim]."""
    mixed = scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return mixed.transpose(1, 2)


def mix_all(x: Tensor, layer: nn.Linear, rotation: Rotation | None, heads: int) -> Tensor:
    """Mix all tokens of each batch item. x: [B, T, width]."""
    return attend_all(*apart(linear(x, layer), rotation, heads)).flatten(-2)


@dataclass(frozen=True, slots=True)
class MixCached:
    """A Mix through the KV cache of one layer. x: [T, width], the tokens of all sequences."""

    kv: KVView
    layer: int

    def __call__(self, x: Tensor, layer: nn.Linear, rotation: Rotation | None, heads: int) -> Tensor:
        if rotation is not None and isinstance(self.kv, PlacedView):
            query = qkv_rotary(x, layer, rotation, heads, self.kv.places(self.layer))
            return self.kv.attend_placed(self.layer, query, kernel=frame_kernel(query)).flatten(-2)
        return self.kv.attend(self.layer, *apart(linear(x, layer), rotation, heads)).flatten(-2)

    def keep(self, x: Tensor, layer: nn.Linear, rotation: Rotation, heads: int) -> None:
        """Append keys and values without computing attention."""
        if isinstance(self.kv, PlacedView):
            qkv_rotary(x, layer, rotation, heads, self.kv.places(self.layer))
        else:
            self(x, layer, rotation, heads)


def frame_kernel(query: Tensor) -> DenseKernel | None:
    """Return the attention kernel of frames on CUDA; None if another Triton release is installed."""
    if not query.is_cuda:
        return None
    gluon = importlib.import_module("mstar_core.layers.kernels.gluon")
    kernel: DenseKernel | None = gluon.gluon_kernels("mstar_vjepa2.kernels.dense", "frames of one request")
    return kernel


def apart(packed: Tensor, rotation: Rotation | None, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split joined projections into rotated queries, rotated keys, and values: [..., T, heads, head_dim] each."""
    joined = packed.unflatten(-1, (3 * heads, -1))
    both, value = joined.split([2 * heads, heads], dim=-2)
    if rotation is not None:
        both = rotate(both, rotation)  # queries and keys are rotated as twice as many heads
    query, key = both.chunk(2, dim=-2)
    return query, key, value


class Attention(nn.Module):
    """Attention with one matrix for queries, keys and values, in this order."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, rotation: Rotation | None, mix: Mix) -> Branch:
        """Return the branch to add to the residual. x: [..., T, width]."""
        return branch_of(mix(x, self.qkv, rotation, self.heads), self.proj)


class Mlp(nn.Module):
    """Two linear layers around an exact GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Branch:
        """Return the branch to add to the residual. x: [..., width]."""
        return branch_of(linear(x, self.fc1, gelu), self.fc2)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). The caller adds the last branch."""

    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps)
        self.mlp = Mlp(width, inner)

    def forward(
        self, x: Tensor, branch: Branch | None, rotation: Rotation | None, mix: Mix = mix_all
    ) -> tuple[Tensor, Branch]:
        """Run the block. x: [..., T, width]; branch: pending addend of x. Returns both for the next block."""
        x, normed = sum_norm(x, branch, self.norm1)
        x, normed = sum_norm(x, self.attn(normed, rotation, mix), self.norm2)
        return x, self.mlp(normed)


def sum_norm(x: Tensor, branch: Branch | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return the sum of x and its branch, and the norm of the sum. x: [..., width]."""
    if x.is_cuda:
        sums: tuple[Tensor, Tensor] = importlib.import_module("mstar_core.layers.kernels.elementwise").add_layer_norm(
            x.contiguous(),
            None if branch is None else branch.values.contiguous(),
            norm,
            None if branch is None else branch.bias,
        )
        return sums
    x = x if branch is None else branch.added(x)
    return x, norm(x)


def stack(config: VitConfig) -> nn.ModuleList:
    """Return the blocks of a stack."""
    return nn.ModuleList(Block(config.width, config.heads, config.inner, config.eps) for _ in range(config.layers))
