"""Convolutions of Code2Wav: upsampling of frames, then the decoder of samples.

Parameters are named as in the checkpoint. Source: specification section 13. On CUDA `fused_decoder` replaces the
decoder; the upsampling runs everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import torch
from torch import nn
from torch.nn.functional import conv1d, conv_transpose1d, gelu, linear, pad

from mstar_core.layers.snake_conv import SnakeBeta

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_qwen3omni.checkpoint.config import VocoderSizes

KERNEL: Final = 7
DILATIONS: Final = (1, 3, 9)


class CausalConv(nn.Module):
    """Convolution that sees earlier steps only: zeros are added in front."""

    def __init__(self, inner: int, outer: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inner, outer, kernel, dilation=dilation, groups=groups)

    @property
    def reach(self) -> int:
        """Earlier steps that a step depends on."""
        return int((self.conv.kernel_size[0] - 1) * self.conv.dilation[0])

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, outer, T]. x: [B, inner, T]."""
        conv = self.conv
        return conv1d(pad(x, (self.reach, 0)), conv.weight, conv.bias, dilation=conv.dilation, groups=conv.groups)


class TransposedConv(nn.Module):
    """Upsampling by `rate`. kernel - rate samples are cut off on both sides."""

    def __init__(self, inner: int, outer: int, kernel: int, rate: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inner, outer, kernel, rate)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, outer, T * rate - (kernel - rate)]. x: [B, inner, T]."""
        conv = self.conv
        cut = int(conv.kernel_size[0]) - self.rate
        return conv_transpose1d(x, conv.weight, conv.bias, self.rate, padding=cut)

    def of_frames(self, x: Tensor) -> Tensor:
        """Return [B, T * rate, outer] where the kernel is as long as the rate. x: [B, T, inner]."""
        weight, bias = self.conv.weight, self.conv.bias
        assert bias is not None and weight.shape[2] == self.rate
        wide = linear(x, weight.permute(2, 1, 0).reshape(-1, weight.shape[0]), bias.repeat(self.rate))
        return wide.view(len(x), -1, weight.shape[1])


class ConvNeXt(nn.Module):
    """x + gamma * mlp(norm(depthwise(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(width, width, KERNEL, groups=width)
        self.norm = nn.LayerNorm(width, 1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape. x: [B, T, width]."""
        mixed = self.dwconv(x.transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.gamma * self.pwconv2(gelu(self.pwconv1(self.norm(mixed))))
        return out


class ResidualUnit(nn.Module):
    """x + conv1(snake(conv7(snake(x))))."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv(channels, channels, KERNEL, dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = CausalConv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape. x: [B, channels, T]."""
        out: Tensor = x + self.conv2(self.act2(self.conv1(self.act1(x))))
        return out


class DecoderBlock(nn.Module):
    """Snake, upsampling by `rate`, residual units."""

    def __init__(self, inner: int, outer: int, rate: int) -> None:
        super().__init__()
        units = (ResidualUnit(outer, dilation) for dilation in DILATIONS)
        self.block = nn.ModuleList([SnakeBeta(inner), TransposedConv(inner, outer, 2 * rate, rate), *units])

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, outer, (T - 1) * rate]. x: [B, inner, T]."""
        for part in self.block:
            x = part(x)
        return x


def upsampling(sizes: VocoderSizes) -> nn.ModuleList:
    """Return the stages that multiply the rate of frames."""
    width = sizes.width
    stages = (nn.ModuleList([TransposedConv(width, width, ratio, ratio), ConvNeXt(width)]) for ratio in sizes.ratios)
    return nn.ModuleList(stages)


def decoding(sizes: VocoderSizes) -> nn.ModuleList:
    """Return the layers from frame vectors to one channel of samples. Each block halves the channels."""
    channels = [sizes.decoder >> index for index in range(len(sizes.rates) + 1)]
    blocks = [
        DecoderBlock(inner, outer, rate)
        for inner, outer, rate in zip(channels, channels[1:], sizes.rates, strict=False)
    ]
    entry, last = CausalConv(sizes.width, channels[0], KERNEL), channels[-1]
    return nn.ModuleList([entry, *blocks, SnakeBeta(last), CausalConv(last, 1, KERNEL)])


def upsampled(stages: nn.ModuleList, x: Tensor) -> Tensor:
    """Run the upsampling stages. x: [B, T, width]; returns [B, T * product of ratios, width]."""
    for stage in stages:
        up, mix = cast("nn.ModuleList", stage)
        assert isinstance(up, TransposedConv)
        x = mix(up.of_frames(x))
    return x


def decoded(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Run the decoder: samples [B, S] in [-1, 1]. x: [B, T, width]."""
    x = x.transpose(1, 2)
    for layer in layers:
        x = layer(x)
    return x.squeeze(1).clamp(-1.0, 1.0)
