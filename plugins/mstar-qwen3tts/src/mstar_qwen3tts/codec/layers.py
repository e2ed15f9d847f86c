"""Causal layers that go on from a state: each reads the last inputs before its new ones, and returns the next ones.

A state of zeros is the beginning of a stream. Parameters are named as in the checkpoint.
Source: specification sections 11 and 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn.functional import conv1d, conv_transpose1d, gelu, scaled_dot_product_attention

from mstar_core.layers import RMSNorm, Rotary, RotarySpec, rotate
from mstar_core.layers.snake_conv import SnakeBeta
from mstar_core.layers.transformer import GatedMLP

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_qwen3tts.checkpoint.config import CodecSizes

KERNEL: Final = 7
DILATIONS: Final = (1, 3, 9)


class States:
    """States of all layers in one row of numbers per stream, in the order in which the layers take them.

    before: float32 [B, values]; after: memory for the states after this step, the same shape. A call of `take` returns
    the next state, and `give` stores its successor.
    """

    def __init__(self, before: Tensor, after: Tensor | None = None) -> None:
        self._before, self._after = before, torch.empty_like(before) if after is None else after
        self._taken = self._given = 0

    def take(self, *shape: int) -> Tensor:
        """Return the next state, [B, *shape]."""
        size = 1
        for count in shape:
            size *= count
        part = self._before[:, self._taken : self._taken + size]
        self._taken += size
        return part.reshape(-1, *shape)

    def give(self, value: Tensor) -> None:
        """Store the state after this step."""
        self._room(value[0].numel()).view(value.shape).copy_(value)

    def exchange(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the next state and the memory of its successor, [B, size] each, which a kernel fills."""
        return self.take(size), self._room(size)

    def after(self) -> Tensor:
        """Return the states after the step: [B, values]."""
        return self._after

    def _room(self, size: int) -> Tensor:
        self._given += size
        return self._after[:, self._given - size : self._given]


class CausalConv(nn.Module):
    """Convolution that sees earlier steps only. The state is its last inputs."""

    def __init__(self, inner: int, outer: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inner, outer, kernel, dilation=dilation, groups=groups)
        self.reach = (kernel - 1) * dilation

    @property
    def values(self) -> int:
        """Values of the state of one stream."""
        return int(self.conv.in_channels) * self.reach

    def forward(self, x: Tensor, states: States) -> Tensor:
        """Return [B, outer, T]. x: [B, inner, T]."""
        if self.reach:
            x = torch.cat([states.take(x.shape[1], self.reach).to(x.dtype), x], dim=2)
            states.give(x[:, :, -self.reach :])
        conv = self.conv
        return conv1d(x, conv.weight, conv.bias, dilation=conv.dilation, groups=conv.groups)


class TransposedConv(nn.Module):
    """Upsampling by `rate`. The state is the last input where the kernel is longer than the rate."""

    def __init__(self, inner: int, outer: int, kernel: int, rate: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inner, outer, kernel, rate)
        self.rate, self.overlaps = rate, kernel > rate

    @property
    def values(self) -> int:
        """Values of the state of one stream."""
        return int(self.conv.in_channels) * self.overlaps

    def forward(self, x: Tensor, states: States) -> Tensor:
        """Return [B, outer, T * rate]. x: [B, inner, T]."""
        count, conv = x.shape[2] * self.rate, self.conv
        if not self.overlaps:
            return conv_transpose1d(x, conv.weight, conv.bias, self.rate)
        x = torch.cat([states.take(x.shape[1], 1).to(x.dtype), x], dim=2)
        states.give(x[:, :, -1:])
        made = conv_transpose1d(x, conv.weight, conv.bias, self.rate)
        return made[:, :, self.rate : self.rate + count]


class LayerScale(nn.Module):
    """A factor per channel on a residual branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class WindowAttention(nn.Module):
    """Attention of each frame to itself and `window - 1` frames before it. The state is their keys and values.

    Keys are kept before rotation, and positions count from the oldest kept frame: rotation depends on distances alone,
    so streams of any age share their tables.
    """

    def __init__(self, sizes: CodecSizes) -> None:
        super().__init__()
        self.heads, self.head_dim, self.past = sizes.heads, sizes.head_dim, sizes.window - 1
        inner = sizes.heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, inner, bias=False)
        self.k_proj = nn.Linear(sizes.width, inner, bias=False)
        self.v_proj = nn.Linear(sizes.width, inner, bias=False)
        self.o_proj = nn.Linear(inner, sizes.width, bias=False)

    @property
    def values(self) -> int:
        """Values of the state of one stream."""
        return 2 * self.heads * self.head_dim * self.past

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, states: States) -> Tensor:
        """Return x's shape. x: [B, T, width]; rotation: of past + T positions; mask: bool [B, 1, T, past + T]."""
        query, key, value = (
            part(x).unflatten(-1, (self.heads, self.head_dim)) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        before = states.take(2, self.past, self.heads, self.head_dim).to(x.dtype)
        key, value = torch.cat([before[:, 0], key], dim=1), torch.cat([before[:, 1], value], dim=1)
        states.give(key[:, -self.past :])
        states.give(value[:, -self.past :])
        cosine, sine = rotation
        query = rotate(query, cosine[self.past :], sine[self.past :])
        key = rotate(key, cosine, sine)
        mixed = scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class FrameBlock(nn.Module):
    """x + scale * attention(norm(x)), then x + scale * mlp(norm(x))."""

    def __init__(self, sizes: CodecSizes) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.width, sizes.norm_eps)
        self.self_attn = WindowAttention(sizes)
        self.self_attn_layer_scale = LayerScale(sizes.width)
        self.post_attention_layernorm = RMSNorm(sizes.width, sizes.norm_eps)
        self.mlp = GatedMLP(sizes.width, sizes.mlp)
        self.mlp_layer_scale = LayerScale(sizes.width)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, states: States) -> Tensor:
        """Return x's shape. x: [B, T, width]."""
        branch = self.self_attn(self.input_layernorm(x), rotation, mask, states)
        x = x + self.self_attn_layer_scale(branch)
        normed = self.post_attention_layernorm(x)
        out: Tensor = x + self.mlp_layer_scale(self.mlp(normed.flatten(0, 1)).view_as(x))
        return out


class PreTransformer(nn.Module):
    """Transformer over frames between two linear layers. The state begins with the number of frames seen."""

    def __init__(self, sizes: CodecSizes) -> None:
        super().__init__()
        self.past = sizes.window - 1
        self.input_proj = nn.Linear(sizes.latent, sizes.width)
        self.layers = nn.ModuleList(FrameBlock(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.output_proj = nn.Linear(sizes.width, sizes.latent)
        self.rotary = Rotary(RotarySpec(width=sizes.head_dim, base=sizes.rope_base))

    @property
    def values(self) -> int:
        """Values of the state of one stream."""
        return 1

    def forward(self, x: Tensor, states: States) -> Tensor:
        """Return x's shape. x: [B, T, latent]."""
        count = x.shape[1]
        seen = states.take(1)
        states.give((seen + count).clamp(max=self.past))
        place = torch.arange(self.past + count, device=x.device)
        behind = place[self.past :, None] - place[None]
        mask = (behind >= 0) & (behind <= self.past)
        is_known = place[None] >= self.past - seen
        mask = mask[None, None] & is_known[:, None, None]
        rotation = self.rotary(place)
        x = self.input_proj(x)
        for layer in self.layers:
            x = layer(x, rotation, mask, states)
        out: Tensor = self.output_proj(self.norm(x))
        return out


class ConvNeXt(nn.Module):
    """x + gamma * mlp(norm(depthwise(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(width, width, KERNEL, groups=width)
        self.norm = nn.LayerNorm(width, 1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, states: States) -> Tensor:
        """Return x's shape. x: [B, width, T]."""
        mixed = self.dwconv(x, states).transpose(1, 2)
        wide = self.gamma * self.pwconv2(gelu(self.pwconv1(self.norm(mixed))))
        out: Tensor = x + wide.transpose(1, 2)
        return out


class ResidualUnit(nn.Module):
    """x + conv1(snake(conv7(snake(x))))."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv(channels, channels, KERNEL, dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = CausalConv(channels, channels, 1)

    def forward(self, x: Tensor, states: States) -> Tensor:
        """Return x's shape. x: [B, channels, T]."""
        out: Tensor = x + self.conv2(self.act2(self.conv1(self.act1(x), states)), states)
        return out


class DecoderBlock(nn.Module):
    """Snake, upsampling by `rate`, residual units."""

    def __init__(self, inner: int, outer: int, rate: int) -> None:
        super().__init__()
        units = (ResidualUnit(outer, dilation) for dilation in DILATIONS)
        self.block = nn.ModuleList([SnakeBeta(inner), TransposedConv(inner, outer, 2 * rate, rate), *units])

    def forward(self, x: Tensor, states: States) -> Tensor:
        """Return [B, outer, T * rate]. x: [B, inner, T]."""
        snake, *rest = self.block
        x = snake(x)
        for part in rest:
            x = part(x, states)
        return x
