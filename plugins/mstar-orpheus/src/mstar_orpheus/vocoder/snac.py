"""SNAC 24 kHz decoder: three levels of codes to samples. Built by `model`, run by the vocoder node.

The modules are nested as the checkpoint's keys are, so that its names need no table. Always float32: snake with a
large alpha is sensitive, and the model is tiny.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from mstar_core.errors import WeightsError
from mstar_orpheus.checkpoint.layout import read_json
from mstar_orpheus.config import VQ_STRIDES, number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SnacConfig:
    """Sizes of the decoder. latent: width of the quantizer's output. rates: upsampling of the blocks, in order."""

    latent: int
    width: int
    rates: tuple[int, ...]
    codebook_size: int
    codebook_dim: int
    sample_rate: int

    @classmethod
    def read(cls, path: Path) -> SnacConfig:
        """Read a SNAC config.json. Raises WeightsError for a variant that this decoder does not compute."""
        config = read_json(path)
        _refuse_variants(config, path)
        return cls(
            latent=number(config, "encoder_dim", path) * 2 ** len(config["encoder_rates"]),
            width=number(config, "decoder_dim", path),
            rates=tuple(int(rate) for rate in config["decoder_rates"]),
            codebook_size=number(config, "codebook_size", path),
            codebook_dim=number(config, "codebook_dim", path),
            sample_rate=number(config, "sampling_rate", path),
        )

    @property
    def hop(self) -> int:
        """Samples per latent step."""
        return math.prod(self.rates)

    @property
    def frame_samples(self) -> int:
        """Samples per frame of seven codes."""
        return self.hop * max(VQ_STRIDES)

    def noise_lengths(self, frames: int) -> list[int]:
        """Length of each noise block's tensor for so many frames."""
        steps = frames * max(VQ_STRIDES)
        return [steps * math.prod(self.rates[: block + 1]) for block in range(len(self.rates))]


def _refuse_variants(config: Mapping[str, Any], path: Path) -> None:
    wanted = {"attn_window_size": None, "noise": True, "depthwise": True, "vq_strides": list(VQ_STRIDES)}
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise WeightsError(
                f"{path}: {key} is {config[key]!r}",
                f"this decoder computes the 24 kHz variant, where it is {value!r}",
                "use hubertsiuzdak/snac_24khz",
                file=str(path),
            )
    for key in ("encoder_rates", "decoder_rates"):
        if not isinstance(config.get(key), list) or not config[key]:
            raise WeightsError(
                f"{path}: {key} is {config.get(key)!r}, not a list of rates",
                hint="fetch this file again",
                file=str(path),
            )
    if any(rate % 2 for rate in config["decoder_rates"]):
        raise WeightsError(
            f"{path}: decoder_rates {config['decoder_rates']} must be even",
            hint="use hubertsiuzdak/snac_24khz",
            file=str(path),
        )


class Snake(nn.Module):
    """x + sin(alpha x)**2 / alpha, alpha per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.alpha * x).square() / (self.alpha + 1e-9)


class NoiseBlock(nn.Module):
    """x + noise * W x, the noise shared by all channels and given by the caller."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Conv1d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor, noise: Tensor | None) -> Tensor:
        if noise is None:
            return x
        mixed: Tensor = self.linear(x)
        return x + noise * mixed


class ResidualUnit(nn.Module):
    """Two snake-conv pairs, the first depthwise and dilated, added to the input."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            Snake(channels),
            nn.Conv1d(channels, channels, 7, dilation=dilation, padding=3 * dilation, groups=channels),
            Snake(channels),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return x + y


class SnacBlock(nn.Module):
    """Upsample by `stride`, add noise, three residual units."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        up = nn.ConvTranspose1d(channels, out_channels, 2 * stride, stride, padding=stride // 2)
        units = [ResidualUnit(out_channels, dilation) for dilation in (1, 3, 9)]
        self.block = nn.ModuleList([Snake(channels), up, NoiseBlock(out_channels), *units])

    def forward(self, x: Tensor, noise: Tensor | None) -> Tensor:
        snake, up, noisy, *units = self.block
        x = noisy(up(snake(x)), noise)
        for unit in units:
            x = unit(x)
        return x


class SnacDecoder(nn.Module):
    """Latent [B, latent, T] to samples [B, 1, T * hop]."""

    def __init__(self, config: SnacConfig) -> None:
        super().__init__()
        widths = [config.width // 2**depth for depth in range(len(config.rates) + 1)]
        blocks = [SnacBlock(a, b, rate) for a, b, rate in zip(widths, widths[1:], config.rates, strict=False)]
        entry = nn.Conv1d(config.latent, config.latent, 7, padding=3, groups=config.latent)
        mixing = nn.Conv1d(config.latent, config.width, 1)
        self.rates = config.rates
        self.model = nn.ModuleList([entry, mixing, *blocks, Snake(widths[-1]), nn.Conv1d(widths[-1], 1, 7, padding=3)])

    def forward(self, latent: Tensor, noise: Sequence[Tensor] | None, keep: tuple[int, int] | None = None) -> Tensor:
        entry, mixing, *blocks, snake, output = self.model
        x = mixing(entry(latent))
        if keep is None:
            for index, block in enumerate(blocks):
                x = block(x, None if noise is None else noise[index])
            return torch.tanh(output(snake(x)))
        start = 0  # of x, in steps of its own rate
        for index, (low, high) in enumerate(needed(keep, self.rates, latent.shape[2])):
            x = x[:, :, low - start : high - start].contiguous()
            rate = self.rates[index]
            start = low * rate
            own = None if noise is None else noise[index][:, :, start : high * rate]
            x = blocks[index](x, own)
        made = torch.tanh(output(snake(x)))
        return made[:, :, keep[0] - start : keep[1] - start]


UNITS_REACH: Final = 3 * (1 + 3 + 9)
"""Steps to each side that a block's residual units look at: kernels of 7, dilated by 1, 3 and 9."""
OUTPUT_REACH: Final = 3


def needed(keep: tuple[int, int], rates: Sequence[int], steps: int) -> list[tuple[int, int]]:
    """Steps of each block's input that the samples `keep` depend on, in block order. steps: length of the latent."""
    lengths = [steps * math.prod(rates[:block]) for block in range(len(rates))]
    low, high = keep[0] - OUTPUT_REACH, keep[1] + OUTPUT_REACH
    spans = []
    for rate, length in zip(reversed(rates), reversed(lengths), strict=True):
        # A transposed convolution of stride r and kernel 2r, padded by r/2: two inputs meet in every output.
        low, high = low - UNITS_REACH, high + UNITS_REACH
        low = max((low + rate // 2 - 2 * rate + 1) // rate, 0)
        high = min((high - 1 + rate // 2) // rate + 1, length)
        spans.append((low, high))
    return spans[::-1]


class Codebook(nn.Module):
    """One level: raw table and projection to the latent width."""

    def __init__(self, config: SnacConfig) -> None:
        super().__init__()
        self.codebook = nn.Embedding(config.codebook_size, config.codebook_dim)
        self.out_proj = nn.Conv1d(config.codebook_dim, config.latent, 1)

    def forward(self, codes: Tensor) -> Tensor:
        projected: Tensor = self.out_proj(self.codebook(codes).transpose(1, 2))
        return projected


class Quantizer(nn.Module):
    """Three levels of codes, each repeated to the finest rate, summed."""

    def __init__(self, config: SnacConfig) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(Codebook(config) for _ in VQ_STRIDES)

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        parts = zip(self.quantizers, levels, VQ_STRIDES, strict=True)
        return torch.stack([book(codes).repeat_interleave(stride, dim=2) for book, codes, stride in parts]).sum(0)


class Snac(nn.Module):
    """Decoding half of SNAC."""

    def __init__(self, config: SnacConfig) -> None:
        super().__init__()
        self.config = config
        self.quantizer = Quantizer(config)
        self.decoder = SnacDecoder(config)

    def latent(self, levels: Sequence[Tensor]) -> Tensor:
        """Quantizer output. levels: int64 [B, frames * (1 | 2 | 4)]. Returns float32 [B, latent, 4 * frames]."""
        latent: Tensor = self.quantizer(levels)
        return latent

    def decode(
        self,
        levels: Sequence[Tensor],
        noise: Sequence[Tensor] | None = None,
        keep: tuple[int, int] | None = None,
    ) -> Tensor:
        """Samples of whole frames, or of `keep` (first sample, end) alone: nothing is computed for the others only.

        levels: int64 [B, frames * (1 | 2 | 4)], codes in range. noise: one float32 [B, 1, T] per block (lengths of
        `SnacConfig.noise_lengths`), None = off. Returns float32 [B, 1, frames * frame_samples] in (-1, 1).
        """
        samples: Tensor = self.decoder(self.latent(levels), noise, keep)
        return samples


_GAINS = {".parametrizations.weight.original0": ".parametrizations.weight.original1", ".weight_g": ".weight_v"}
ENCODER: Final = "encoder."
"""Prefix of the weights that only encoding needs."""


def decoding_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The decoding half of a published state dict, float32, with weight normalisation folded in.

    The effective weight is g * v / |v|, the norm over every dimension but the first, which for a transposed
    convolution is the input channel. Encoder and `in_proj` are left out. Raises WeightsError for a gain without
    its direction.
    """
    wanted = {k: v.float() for k, v in state.items() if not k.startswith(ENCODER) and ".in_proj." not in k}
    folded: dict[str, Tensor] = {}
    for key, value in wanted.items():
        gain = next((suffix for suffix in _GAINS if key.endswith(suffix)), None)
        if gain is not None:
            stem = key.removesuffix(gain)
            folded[f"{stem}.weight"] = _folded(value, wanted, stem + _GAINS[gain])
        elif not key.endswith(tuple(_GAINS.values())):
            folded[key] = value
    return folded


def _folded(gain: Tensor, state: Mapping[str, Tensor], direction: str) -> Tensor:
    if direction not in state:
        raise WeightsError(
            f"the vocoder's weights lack {direction}", "its gain is there", "fetch the file again", key=direction
        )
    v = state[direction]
    length: Tensor = torch.linalg.vector_norm(v, dim=tuple(range(1, v.dim())), keepdim=True)
    return gain * v / length
