"""Layers of both autoencoders: causal convolutions over time whose last inputs are kept between chunks of a video.

Names of parameters are those of the published files. Source: the model's specification, section 8.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import conv2d, conv3d, interpolate, normalize, pad, scaled_dot_product_attention, silu

if TYPE_CHECKING:
    from torch import Tensor


class Memory:
    """Last inputs of the layers of one network, in the order of their use: one flat tensor between two chunks.

    Used by one chunk. flat: what the chunk before left, empty before the first one. parts: values kept by a first
    chunk, one per layer.
    """

    def __init__(self, flat: Tensor) -> None:
        self._before = flat
        self._after = torch.empty_like(flat)
        self.parts: list[Tensor] = []
        self._at = 0

    @property
    def is_first(self) -> bool:
        """Whether this is the first chunk, which holds the first frame alone."""
        return not self._before.numel()

    def peek(self, shape: tuple[int, ...]) -> Tensor:
        """Return what the next layer left in the chunk before. Not for the first chunk."""
        return self._before[self._at : self._at + math.prod(shape)].view(shape)

    def keep(self, value: Tensor) -> None:
        """Keep a value of the next layer for the chunk behind this one."""
        if self.is_first:
            self.parts.append(value)
            return
        stop = self._at + value.numel()
        self._after[self._at : stop].view(value.shape).copy_(value)
        self._at = stop

    def flat(self) -> Tensor:
        """Return what the next chunk needs."""
        if not self.is_first:
            return self._after
        return torch.cat([part.flatten() for part in self.parts])


class Norm(nn.Module):
    """Channels scaled to a length of their number's root, per pixel and frame, in float32."""

    def __init__(self, width: int, *, is_image: bool = False) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width, 1, 1) if is_image else torch.empty(width, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        scaled = normalize(x.float(), dim=1, eps=1e-12) * math.sqrt(x.shape[1])
        return (scaled * self.gamma.float()).to(x.dtype)


class TimeConv(nn.Conv3d):
    """Causal convolution: an output frame reads its own and earlier input frames."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int, int] = (3, 3, 3)) -> None:
        super().__init__(inputs, outputs, kernel)
        self._sides = (kernel[1] // 2, kernel[2] // 2)

    def over_time(self, x: Tensor, memory: Memory) -> Tensor:
        """Return as many frames as x has. The frames before the first chunk are zero."""
        kept = self.kernel_size[0] - 1
        if memory.is_first:
            before = x.new_zeros(*x.shape[:2], kept, *x.shape[3:])
        else:
            before = memory.peek((*x.shape[:2], kept, *x.shape[3:]))
        whole = torch.cat([before, x], dim=2)
        memory.keep(whole[:, :, -kept:])
        return self.windowed(whole)

    def windowed(self, x: Tensor) -> Tensor:
        """Return the convolution of frames that include the past."""
        return conv3d(x, self.weight, self.bias, padding=(0, *self._sides))


class ResBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(inputs), Norm(outputs)
        self.conv1, self.conv2 = TimeConv(inputs, outputs), TimeConv(outputs, outputs)
        self.conv_shortcut = TimeConv(inputs, outputs, (1, 1, 1)) if inputs != outputs else None

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        shortcut = x if self.conv_shortcut is None else self.conv_shortcut.windowed(x)
        x = self.conv1.over_time(silu(self.norm1(x)), memory)
        return self.conv2.over_time(silu(self.norm2(x)), memory) + shortcut


class FrameAttention(nn.Module):
    """Attention over all pixels of each frame, with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width, is_image=True)
        self.to_qkv = nn.Conv2d(width, 3 * width, 1)
        self.proj = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        frames = by_frame(x)
        count, width, rows, columns = frames.shape
        qkv = self.to_qkv(self.norm(frames)).view(count, 3, width, rows * columns).transpose(2, 3)
        q, k, v = (each[:, None] for each in qkv.unbind(1))
        seen = scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(count, width, rows, columns)
        return x + by_video(self.proj(seen), x.shape[0])


class MidBlock(nn.Module):
    """ResBlock, attention, ResBlock."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([ResBlock(width, width), ResBlock(width, width)])
        self.attentions = nn.ModuleList([FrameAttention(width)])

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        x = self.attentions[0](self.resnets[0](x, memory))
        out: Tensor = self.resnets[1](x, memory)
        return out


class Down(nn.Module):
    """Half the rows and columns, and with `has_time` half the frames behind the first one."""

    def __init__(self, width: int, *, has_time: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleList([nn.Identity(), nn.Conv2d(width, width, 3, stride=2)])
        self.time_conv = nn.Conv3d(width, width, (3, 1, 1), stride=(2, 1, 1)) if has_time else None

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        conv = self.resample[1]
        assert isinstance(conv, nn.Conv2d)
        x = by_video(conv(pad(by_frame(x), (0, 1, 0, 1))), x.shape[0])
        if self.time_conv is None:
            return x
        last = x[:, :, -1:]
        out = x if memory.is_first else self.time_conv(torch.cat([memory.peek(tuple(last.shape)), x], dim=2))
        memory.keep(last)
        return out


class Up(nn.Module):
    """Twice the rows and columns, and with `has_time` twice the frames behind the first one."""

    def __init__(self, width: int, outputs: int, *, has_time: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleList([nn.Identity(), nn.Conv2d(width, outputs, 3, padding=1)])
        self.time_conv = TimeConv(width, 2 * width, (3, 1, 1)) if has_time else None

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        if self.time_conv is not None:
            x = self._in_time(x, memory, self.time_conv)
        frames = interpolate(by_frame(x), scale_factor=2.0, mode="nearest-exact")
        conv = self.resample[1]
        assert isinstance(conv, nn.Conv2d)
        return by_video(conv2d(frames, conv.weight, conv.bias, padding=1), x.shape[0])

    @staticmethod
    def _in_time(x: Tensor, memory: Memory, conv: TimeConv) -> Tensor:
        if memory.is_first:
            # The first frame stays alone and is not part of the history.
            memory.keep(x.new_zeros(*x.shape[:2], 2, *x.shape[3:]))
            return x
        pairs = conv.over_time(x, memory).unflatten(1, (2, -1))  # earlier, later
        out: Tensor = pairs.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
        return out


def by_frame(x: Tensor) -> Tensor:
    """Return the frames of videos as images: [B, C, F, h, w] -> [B * F, C, h, w]."""
    return x.transpose(1, 2).flatten(0, 1)


def by_video(x: Tensor, batch: int) -> Tensor:
    """Return the inverse of `by_frame`."""
    out: Tensor = x.unflatten(0, (batch, -1)).transpose(1, 2)
    return out
