"""Autoencoders of Wan 2.1 and 2.2: videos to latents and back, in chunks of whole latent frames.

Names of parameters are those of the published files. Source: the model's specification, section 8.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import pad, silu

from mstar_wan22.nodes.vae_parts import Down, Memory, MidBlock, Norm, ResBlock, TimeConv, Up

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_wan22.checkpoint.config import VaeSizes


def fold(video: Tensor, side: int) -> Tensor:
    """Return squares of pixels as channels: [B, 3, F, H, W] -> [B, 3 * side^2, F, H / side, W / side].

    The column within the square is the slower of both.
    """
    if side == 1:
        return video
    cells = video.unflatten(4, (-1, side)).unflatten(3, (-1, side))  # B, C, F, h, row, w, column
    out: Tensor = cells.permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)
    return out


def unfold(folded: Tensor, side: int) -> Tensor:
    """Return the inverse of `fold`."""
    if side == 1:
        return folded
    cells = folded.unflatten(1, (-1, side, side))  # B, C, column, row, F, h, w
    out: Tensor = cells.permute(0, 1, 4, 5, 3, 6, 2).flatten(5, 6).flatten(3, 4)
    return out


def averaged(x: Tensor, outputs: int, in_time: int, in_space: int) -> Tensor:
    """Return x with fewer frames, rows and columns, as means over groups of consecutive channels and places.

    Missing frames before the first one are zero.
    """
    x = pad(x, (0, 0, 0, 0, -x.shape[2] % in_time, 0))
    cells = x.unflatten(4, (-1, in_space)).unflatten(3, (-1, in_space)).unflatten(2, (-1, in_time))
    channels = cells.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)
    out: Tensor = channels.unflatten(1, (outputs, -1)).mean(2)
    return out


def repeated(x: Tensor, outputs: int, in_time: int, in_space: int, *, is_first: bool) -> Tensor:
    """Return x with more frames, rows and columns, each channel repeated. A first frame gives a single one."""
    copies = outputs * in_time * in_space**2 // x.shape[1]
    cells = x.repeat_interleave(copies, dim=1).unflatten(1, (outputs, in_time, in_space, in_space))
    grown: Tensor = cells.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)
    return grown[:, :, in_time - 1 :] if is_first else grown


class _DownBlock(nn.Module):
    """Level of the encoder of 2.2: blocks and a smaller picture, plus means of the input."""

    def __init__(self, inputs: int, outputs: int, blocks: int, *, has_time: bool, is_last: bool) -> None:
        super().__init__()
        widths = [inputs, *[outputs] * blocks]
        self.resnets = nn.ModuleList([ResBlock(a, b) for a, b in itertools.pairwise(widths)])
        self.downsampler = None if is_last else Down(outputs, has_time=has_time)
        self._outputs, self._factors = outputs, (2 if has_time else 1, 1 if is_last else 2)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        added = averaged(x, self._outputs, *self._factors)
        for block in self.resnets:
            x = block(x, memory)
        return (x if self.downsampler is None else self.downsampler(x, memory)) + added


class _UpBlock(nn.Module):
    """Level of a decoder. Of 2.2: plus the repeated input."""

    def __init__(self, inputs: int, outputs: int, blocks: int, *, has_time: bool, is_last: bool, adds: bool) -> None:
        super().__init__()
        widths = [inputs, *[outputs] * blocks]
        self.resnets = nn.ModuleList([ResBlock(a, b) for a, b in itertools.pairwise(widths)])
        if adds:
            self.upsampler = None if is_last else Up(outputs, outputs, has_time=has_time)
        elif not is_last:
            self.upsamplers = nn.ModuleList([Up(outputs, outputs // 2, has_time=has_time)])
        self._outputs, self._in_time = outputs, 2 if has_time else 1
        self._adds, self._is_last = adds and not is_last, is_last

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        before = x
        for block in self.resnets:
            x = block(x, memory)
        if self._is_last:
            return x
        if not self._adds:
            out: Tensor = self.upsamplers[0](x, memory)
            return out
        assert self.upsampler is not None
        grown: Tensor = self.upsampler(x, memory)
        return grown + repeated(before, self._outputs, self._in_time, 2, is_first=memory.is_first)


class _Encoder(nn.Module):
    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        widths = [sizes.base * factor for factor in (1, *sizes.multipliers)]
        last = len(sizes.multipliers) - 1
        self.conv_in = TimeConv(3 * sizes.fold**2, widths[0])
        blocks: list[nn.Module] = []
        for level, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            has_time = level < last and sizes.temporal[level]
            if sizes.is_residual:
                blocks.append(_DownBlock(inputs, outputs, sizes.blocks, has_time=has_time, is_last=level == last))
                continue
            blocks += [ResBlock(inputs if number == 0 else outputs, outputs) for number in range(sizes.blocks)]
            blocks += [Down(outputs, has_time=has_time)] if level < last else []
        self.down_blocks = nn.ModuleList(blocks)
        self.mid_block = MidBlock(widths[-1])
        self.norm_out = Norm(widths[-1])
        self.conv_out = TimeConv(widths[-1], 2 * sizes.channels)

    def forward(self, x: Tensor, memory: Memory, seen: dict[str, Tensor] | None = None) -> Tensor:
        return _through(self, "down_block", self.down_blocks, x, memory, seen)


class _Decoder(nn.Module):
    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        factors = sizes.multipliers[::-1]
        widths = [sizes.decoder_base * factor for factor in (factors[0], *factors)]
        last, in_time = len(factors) - 1, (*sizes.temporal[::-1], False)
        self.conv_in = TimeConv(sizes.channels, widths[0])
        self.mid_block = MidBlock(widths[0])
        self.up_blocks = nn.ModuleList(
            [
                _UpBlock(
                    inputs // 2 if level and not sizes.is_residual else inputs,
                    outputs,
                    sizes.blocks + 1,
                    has_time=in_time[level],
                    is_last=level == last,
                    adds=sizes.is_residual,
                )
                for level, (inputs, outputs) in enumerate(itertools.pairwise(widths))
            ]
        )
        self.norm_out = Norm(widths[-1])
        self.conv_out = TimeConv(widths[-1], 3 * sizes.fold**2)

    def forward(self, x: Tensor, memory: Memory, seen: dict[str, Tensor] | None = None) -> Tensor:
        return _through(self, "up_block", self.up_blocks, x, memory, seen)


def _through(
    net: _Encoder | _Decoder,
    name: str,
    levels: nn.ModuleList,
    x: Tensor,
    memory: Memory,
    seen: dict[str, Tensor] | None,
) -> Tensor:
    """Return a chunk's output. seen: filled with intermediate values, for tests."""
    values = {} if seen is None else seen
    x = values["conv_in"] = net.conv_in.over_time(x, memory)
    is_decoder = isinstance(net, _Decoder)
    if is_decoder:
        x = values["mid_block"] = net.mid_block(x, memory)
    for number, level in enumerate(levels):
        x = level(x, memory)
        if seen is not None:
            seen[f"{name}_{number}"] = x
    if not is_decoder:
        x = values["mid_block"] = net.mid_block(x, memory)
    x = values["conv_out"] = net.conv_out.over_time(silu(net.norm_out(x)), memory)
    return x


def _levels(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu").view(-1, 1, 1, 1)


class Encoder(nn.Module):
    """Videos to normalised latents: the mean of the posterior, without a draw."""

    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        self.encoder = _Encoder(sizes)
        self.quant_conv = TimeConv(2 * sizes.channels, 2 * sizes.channels, (1, 1, 1))
        self.sizes = sizes

    def encode(self, video: Tensor) -> Tensor:
        """Return float32 [channels, T, h, w]. video: [3, F, H, W] in -1..1; frames beyond 4 T - 3 are ignored."""
        mean = self.moments(video)[: self.sizes.channels].float()
        low, wide = (_levels(values).to(mean.device) for values in (self.sizes.mean, self.sizes.std))
        return (mean - low) / wide

    def moments(self, video: Tensor) -> Tensor:
        """Return mean and log-variance of the posterior as channels: [2 * channels, T, h, w]."""
        memory = video.new_empty(0)
        chunks = []
        for start, stop in chunk_bounds(video.shape[1], self.sizes.frames):
            out, memory = self.chunk(video[:, start:stop], memory)
            chunks.append(self.quant_conv.windowed(out[None])[0])
        return torch.cat(chunks, dim=1)

    def chunk(self, frames: Tensor, memory: Tensor, seen: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return the output of a chunk before `quant_conv`, and the memory behind it. frames: [3, F, H, W]."""
        kept = Memory(memory)
        return self.encoder(fold(frames[None], self.sizes.fold), kept, seen)[0], kept.flat()


class Decoder(nn.Module):
    """Normalised latents to videos, one chunk of latent frames at a time."""

    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        self.post_quant_conv = TimeConv(sizes.channels, sizes.channels, (1, 1, 1))
        self.decoder = _Decoder(sizes)
        self.sizes = sizes

    def denormalised(self, latents: Tensor) -> Tensor:
        """Return the decoder's own latents. latents: float32 [channels, T, h, w]."""
        low, wide = (_levels(values).to(latents.device) for values in (self.sizes.mean, self.sizes.std))
        return latents * wide + low

    def chunk(self, latents: Tensor, memory: Tensor, seen: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return frames in -1..1, [3, F, H, W], and the memory behind them.

        latents: normalised, [channels, T, h, w]. With an empty memory it is the first latent frame, which gives one
        frame; each later one gives four.
        """
        kept = Memory(memory)
        dtype = self.post_quant_conv.weight.dtype
        z = self.post_quant_conv.windowed(self.denormalised(latents)[None].to(dtype))
        if seen is not None:
            seen["post_quant"] = z
        out = unfold(self.decoder(z, kept, seen), self.sizes.fold)
        return out[0].float().clamp(-1, 1), kept.flat()

    def decode(self, latents: Tensor) -> Tensor:
        """Return the whole video, float32 [3, F, H, W] in -1..1."""
        memory = latents.new_empty(0, dtype=self.post_quant_conv.weight.dtype)
        chunks = []
        for number in range(latents.shape[1]):
            frames, memory = self.chunk(latents[:, number : number + 1], memory)
            chunks.append(frames)
        return torch.cat(chunks, dim=1)


def chunk_bounds(frames: int, per_latent: int) -> list[tuple[int, int]]:
    """Return the frames of each chunk of a video: the first one alone, then as many as a latent frame has."""
    whole = (frames - 1) // per_latent
    return [(0, 1), *((1 + number * per_latent, 1 + (number + 1) * per_latent) for number in range(whole))]
