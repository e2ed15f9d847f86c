"""Speaker encoder (ECAPA-TDNN): a mel spectrogram to one vector (specification section 14).

Parameters are named as in the checkpoint after `speaker_encoder.`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn.functional import conv1d, pad

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_qwen3tts.checkpoint.config import SpeakerSizes

LEAST: Final = 1e-12


class SameConv(nn.Module):
    """Convolution that keeps the length, with mirrored edges."""

    def __init__(self, inner: int, outer: int, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inner, outer, kernel, dilation=dilation)
        self.edge = dilation * (kernel - 1) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, outer, T], after a ReLU. x: [1, inner, T]."""
        x = pad(x, (self.edge, self.edge), mode="reflect") if self.edge else x
        return conv1d(x, self.conv.weight, self.conv.bias, dilation=self.conv.dilation).relu()


class Res2Net(nn.Module):
    """Convolutions of slices of the channels, each of which reads the one before."""

    def __init__(self, channels: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.scale, width = scale, channels // scale
        self.blocks = nn.ModuleList(SameConv(width, width, kernel, dilation) for _ in range(scale - 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape. x: [1, channels, T]."""
        first, *parts = x.chunk(self.scale, dim=1)
        made: list[Tensor] = [first]
        for index, (block, part) in enumerate(zip(self.blocks, parts, strict=True)):
            made.append(block(part + made[-1] if index else part))
        return torch.cat(made, dim=1)


class Squeeze(nn.Module):
    """A factor per channel from the mean over time."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, inner, 1)
        self.conv2 = nn.Conv1d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape."""
        factor: Tensor = self.conv2(self.conv1(x.mean(dim=2, keepdim=True)).relu()).sigmoid()
        return x * factor


class SqueezeBlock(nn.Module):
    """x + squeeze(tdnn2(res2net(tdnn1(x))))."""

    def __init__(self, channels: int, kernel: int, dilation: int, sizes: SpeakerSizes) -> None:
        super().__init__()
        self.tdnn1 = SameConv(channels, channels)
        self.res2net_block = Res2Net(channels, sizes.scale, kernel, dilation)
        self.tdnn2 = SameConv(channels, channels)
        self.se_block = Squeeze(channels, sizes.squeeze)

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape."""
        out: Tensor = x + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))
        return out


class Pooling(nn.Module):
    """Mean and standard deviation over time, weighted by attention."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.tdnn = SameConv(3 * channels, inner)
        self.conv = nn.Conv1d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, 2 * channels, 1]. x: [1, channels, T]."""
        mean, deviation = _moments(x, torch.full_like(x[:, :1], 1 / x.shape[2]))
        wide = torch.cat([x, mean.expand_as(x), deviation.expand_as(x)], dim=1)
        weights = self.conv(self.tdnn(wide).tanh()).softmax(dim=2)
        return torch.cat(_moments(x, weights), dim=1)


def _moments(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = (weights * x).sum(dim=2, keepdim=True)
    variance = (weights * (x - mean).square()).sum(dim=2, keepdim=True)
    return mean, variance.clamp(min=LEAST).sqrt()


class SpeakerEncoder(nn.Module):
    """One clip's spectrogram to the vector that stands in a prompt for a voice."""

    def __init__(self, sizes: SpeakerSizes) -> None:
        super().__init__()
        channels, kernels, dilations = sizes.channels, sizes.kernels, sizes.dilations
        blocks: list[nn.Module] = [SameConv(sizes.mel, channels[0], kernels[0], dilations[0])]
        blocks += [
            SqueezeBlock(channels[index], kernels[index], dilations[index], sizes)
            for index in range(1, len(channels) - 1)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.mfa = SameConv(channels[-1], channels[-1], kernels[-1], dilations[-1])
        self.asp = Pooling(channels[-1], sizes.attention)
        self.fc = nn.Conv1d(2 * channels[-1], sizes.output, 1)

    def forward(self, mel: Tensor) -> Tensor:
        """Return [output]. mel: [mel, T]."""
        x = mel[None].to(self.fc.weight.dtype)
        made = []
        for block in self.blocks:
            x = block(x)
            made.append(x)
        joined = self.mfa(torch.cat(made[1:], dim=1))
        out: Tensor = self.fc(self.asp(joined))[0, :, 0]
        return out
