"""Transformer in front of Code2Wav's convolutions, with attention over a sliding window of frames.

Parameters are named as in the checkpoint. Source: specification section 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.layers import RMSNorm, Rotary, RotarySpec, rotate
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

    def forward(self, x: Tensor, rows: int, rotation: Rotation, mask: Tensor) -> Tensor:
        """Return x's shape. x: [rows * T, width]; mask: bool [T, T], true where a query sees a key."""
        parts = [each(x).unflatten(-1, (-1, self.head_dim)) for each in (self.q_proj, self.k_proj, self.v_proj)]
        turned = [rotate(parts[0], *rotation), rotate(parts[1], *rotation), parts[2]]
        query, key, value = (each.unflatten(0, (rows, -1)).transpose(1, 2) for each in turned)
        mixed = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(x.shape[0], -1))
        return out


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

    def forward(self, x: Tensor, rows: int, rotation: Rotation, mask: Tensor) -> Tensor:
        """Return x's shape. x: [rows * T, width]."""
        branch = self.self_attn(self.input_layernorm(x), rows, rotation, mask)
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

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape. x: [B, T, width]."""
        rows, frames = x.shape[:2]
        place = torch.arange(frames, device=x.device)
        mask = self._mask(place)
        rotation = self.rotary(place.repeat(rows))
        flat = x.flatten(0, 1)
        for layer in self.layers:
            flat = layer(flat, rows, rotation, mask)
        out: Tensor = self.norm(flat)
        return out.view_as(x)

    def _mask(self, place: Tensor) -> Tensor:
        behind = place[:, None] - place[None]
        return (behind >= 0) & (behind < self.window)
