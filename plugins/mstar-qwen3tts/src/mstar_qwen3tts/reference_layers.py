"""Transformers of the reference: one plain computation for talker, code predictor and both halves of the codec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, silu

Weights = Mapping[str, Tensor]
"""Tensors of a checkpoint's two files by their names there, in float32."""

Sizes = Mapping[str, Any]
"""A part of config.json."""


def transformer(w: Weights, at: str, x: Tensor, sizes: Sizes, window: float = math.inf) -> Tensor:
    """Return [T, width] after all layers (sections 7, 11 and 14). The file has the scales and norms that exist."""
    for layer in range(sizes["num_hidden_layers"]):
        own = f"{at}.layers.{layer}"
        branch = attention(w, f"{own}.self_attn", norm(w, f"{own}.input_layernorm", x, sizes), sizes, window)
        x = x + branch * w.get(f"{own}.self_attn_layer_scale.scale", 1.0)
        branch = mlp(w, f"{own}.mlp", norm(w, f"{own}.post_attention_layernorm", x, sizes))
        x = x + branch * w.get(f"{own}.mlp_layer_scale.scale", 1.0)
    return norm(w, f"{at}.norm", x, sizes) if f"{at}.norm.weight" in w else x


def norm(w: Weights, at: str, x: Tensor, sizes: Sizes) -> Tensor:
    """RMSNorm, or LayerNorm if it has a bias."""
    weight = w[f"{at}.weight"]
    if f"{at}.bias" in w:
        return layer_norm(x, weight.shape, weight, w[f"{at}.bias"], sizes["norm_eps"])
    size: Tensor = (x.square().mean(-1, keepdim=True) + sizes["rms_norm_eps"]).sqrt()
    return weight * x / size


def mlp(w: Weights, at: str, x: Tensor) -> Tensor:
    """down(silu(gate) * up), or fc2(gelu(fc1)) in the codec's encoder."""
    if f"{at}.fc1.weight" in w:
        return linear(gelu(linear(x, w[f"{at}.fc1.weight"])), w[f"{at}.fc2.weight"])
    inner = silu(linear(x, w[f"{at}.gate_proj.weight"])) * linear(x, w[f"{at}.up_proj.weight"])
    return linear(inner, w[f"{at}.down_proj.weight"])


def attention(w: Weights, at: str, x: Tensor, sizes: Sizes, window: float) -> Tensor:
    """Attention of position i to the positions j with i - window < j <= i."""
    width, count = sizes["head_dim"], len(x)
    query, key, value = (linear(x, w[f"{at}.{name}_proj.weight"]).view(count, -1, width) for name in "qkv")
    if f"{at}.q_norm.weight" in w:
        query, key = norm(w, f"{at}.q_norm", query, sizes), norm(w, f"{at}.k_norm", key, sizes)
    query, key = rotated(query, sizes["rope_theta"]), rotated(key, sizes["rope_theta"])
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) / math.sqrt(width)
    behind = torch.arange(count)[:, None] - torch.arange(count)
    chances = scores.masked_fill((behind < 0) | (behind >= window), -math.inf).softmax(-1)
    return linear(torch.einsum("hij,jhd->ihd", chances, value).flatten(1), w[f"{at}.o_proj.weight"])


def rotated(x: Tensor, base: float) -> Tensor:
    """Rotate pairs (i, i + width/2) of position t by t * base^(-2i/width). x: [T, heads, width]."""
    first, second = x.chunk(2, dim=-1)
    half = first.shape[-1]
    angle = (torch.arange(len(x))[:, None] * base ** (-torch.arange(half) / half))[:, None]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def codebook(w: Weights, at: str, name: str) -> Tensor:
    """Return the vectors of a codebook, stored as sums and how many they are sums of (section 4)."""
    return w[f"{at}.{name}"] / w[f"{at}.cluster_usage"].clamp(min=1e-5)[:, None]
