"""Transformer in front of Code2Wav's convolutions, with attention over a sliding window of frames.

Parameters are named as in the checkpoint. Source: specification section 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from mstar_core.layers import RMSNorm, Rotary, RotarySpec, rotate
from mstar_core.layers.linear import elementwise_kernels
from mstar_core.layers.transformer import GatedMLP

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_qwen3omni.checkpoint.config import VocoderSizes

Rotation = tuple["Tensor", "Tensor"]


class LayerScale(nn.Module):
    """A factor per channel on a residual branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class WindowAttention(nn.Module):
    """Attention of each frame to itself and the frames shortly before it."""

    def __init__(self, sizes: VocoderSizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        inner, shared = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, inner, bias=False)
        self.k_proj = nn.Linear(sizes.width, shared, bias=False)
        self.v_proj = nn.Linear(sizes.width, shared, bias=False)
        self.o_proj = nn.Linear(inner, sizes.width, bias=False)
        self._joined: Tensor | None = None

    def join(self) -> None:
        """Join the three input projections into one matrix. Their weights become views of it."""
        parts = (self.q_proj, self.k_proj, self.v_proj)
        self._joined = torch.cat([part.weight.detach() for part in parts])
        for part, weight in zip(
            parts, self._joined.split([len(projection.weight) for projection in parts]), strict=True
        ):
            part.weight.data = weight

    def forward(self, x: Tensor, batch: int, rotation: Rotation, mask: Tensor) -> Tensor:
        """Return x's shape. x: [B * T, width]; mask: bool [T, T], true where a query sees a key."""
        query, key, value = (head.unflatten(0, (batch, -1)).transpose(1, 2) for head in self._rotated(x, rotation))
        mixed = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(x.shape[0], -1))
        return out

    def _rotated(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, ...]:
        """Return queries, keys and values, [B * T, heads, head_dim] each, the first two rotated."""
        if self._joined is not None and x.is_cuda:
            heads, kv_heads = (projection.out_features // self.head_dim for projection in (self.q_proj, self.k_proj))
            packed = linear(x, self._joined)
            turned: tuple[Tensor, ...] = elementwise_kernels().rotate_qkv(packed, heads, kv_heads, *rotation, x.dtype)
            return turned
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(query, *rotation), rotate(key, *rotation), value


class FrameBlock(nn.Module):
    """x + scale * attention(norm(x)), then x + scale * mlp(norm(x))."""

    def __init__(self, sizes: VocoderSizes) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.width, sizes.norm_eps)
        self.self_attn = WindowAttention(sizes)
        self.self_attn_layer_scale = LayerScale(sizes.width)
        self.post_attention_layernorm = RMSNorm(sizes.width, sizes.norm_eps)
        self.mlp = GatedMLP(sizes.width, sizes.mlp)
        self.mlp_layer_scale = LayerScale(sizes.width)

    def forward(self, x: Tensor, batch: int, rotation: Rotation, mask: Tensor) -> Tensor:
        """Return x's shape. x: [B * T, width]."""
        branch = self.self_attn(self.input_layernorm(x), batch, rotation, mask)
        x, normed = self.post_attention_layernorm.after_add(x, self.self_attn_layer_scale(branch))
        out: Tensor = x + self.mlp_layer_scale(self.mlp(normed))
        return out


class PreTransformer(nn.Module):
    """Blocks and final norm. Positions count from 0 in each window."""

    def __init__(self, sizes: VocoderSizes) -> None:
        super().__init__()
        self.window = sizes.window
        self.layers = nn.ModuleList(FrameBlock(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.rotary = Rotary(RotarySpec(width=sizes.head_dim, base=sizes.rope_base))

    def join(self) -> None:
        """Join the input projections of every layer, for CUDA. Called once the weights have their dtype."""
        for layer in self.layers:
            assert isinstance(layer, FrameBlock)
            layer.self_attn.join()

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape. x: [B, T, width]."""
        batch, frames = x.shape[:2]
        place = torch.arange(frames, device=x.device)
        mask = self._mask(place)
        rotation = self.rotary(place.repeat(batch))
        flat = x.flatten(0, 1)
        for layer in self.layers:
            flat = layer(flat, batch, rotation, mask)
        out: Tensor = self.norm(flat)
        return out.view_as(x)

    def _mask(self, place: Tensor) -> Tensor:
        behind = place[:, None] - place[None]
        return (behind >= 0) & (behind < self.window)
