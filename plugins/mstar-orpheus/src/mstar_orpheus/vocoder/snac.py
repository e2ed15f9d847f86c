"""SNAC 24 kHz decoder in PyTorch: three levels of codes to samples. Built by `model`, run by the vocoder node.

The modules are nested like the checkpoint's keys, so weight names need no mapping. The decoder is always float32,
because the snake activation is sensitive with a large alpha.
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
from mstar_orpheus.checkpoint.config import VQ_STRIDES, number
from mstar_orpheus.checkpoint.layout import read_json

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SnacConfig:
    """Sizes of the decoder. latent: width of the quantizer's output. rates: upsampling rates of the blocks."""

    latent: int
    width: int
    rates: tuple[int, ...]
    codebook_size: int
    codebook_dim: int
    sample_rate: int

    @classmethod
    def read(cls, path: Path) -> SnacConfig:
        """Read a SNAC config.json. Raises WeightsError for an unsupported variant."""
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
        """Return the length of each block's noise for `frames` frames."""
        steps = frames * max(VQ_STRIDES)
        return [steps * math.prod(self.rates[: block + 1]) for block in range(len(self.rates))]


def _refuse_variants(config: Mapping[str, Any], path: Path) -> None:
    required = {"attn_window_size": None, "noise": True, "depthwise": True, "vq_strides": list(VQ_STRIDES)}
    for key, value in required.items():
        if config.get(key, value) != value:
            raise WeightsError(
                f"{path}: {key} is {config[key]!r}",
                f"supported is the 24 kHz variant, with {value!r}",
                "use hubertsiuzdak/snac_24khz",
                file=str(path),
            )
    for key in ("encoder_rates", "decoder_rates"):
        if not isinstance(config.get(key), list) or not config[key]:
            raise WeightsError(
                f"{path}: {key} is {config.get(key)!r}, not a list of rates",
                hint="download this file again",
                file=str(path),
            )
    if any(rate % 2 for rate in config["decoder_rates"]):
        raise WeightsError(
            f"{path}: decoder_rates {config['decoder_rates']} must be even",
            hint="use hubertsiuzdak/snac_24khz",
            file=str(path),
        )


class Snake(nn.Module):
    """Snake activation: x + sin(alpha x)**2 / alpha, alpha per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.alpha * x).square() / (self.alpha + 1e-9)


class NoiseBlock(nn.Module):
    """x + noise * W x. The caller gives the noise, which all channels share."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Conv1d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor, noise: Tensor | None) -> Tensor:
        if noise is None:
            return x
        mixed: Tensor = self.linear(x)
        return x + noise * mixed


class ResidualUnit(nn.Module):
    """Residual unit of two snake-convolution pairs, the first depthwise and dilated."""

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
    """Decoder block: upsampling by `stride`, noise, three residual units."""

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
            block_noise = None if noise is None else noise[index][:, :, start : high * rate]
            x = blocks[index](x, block_noise)
        samples = torch.tanh(output(snake(x)))
        return samples[:, :, keep[0] - start : keep[1] - start]


UNITS_REACH: Final = 3 * (1 + 3 + 9)
"""Receptive field of a block's residual units to each side: kernels of 7, dilated by 1, 3 and 9."""
OUTPUT_REACH: Final = 3


def needed(keep: tuple[int, int], rates: Sequence[int], steps: int) -> list[tuple[int, int]]:
    """Return the steps of each block's input that samples `keep` depend on, in block order. steps: of the latent."""
    lengths = [steps * math.prod(rates[:block]) for block in range(len(rates))]
    low, high = keep[0] - OUTPUT_REACH, keep[1] + OUTPUT_REACH
    spans = []
    for rate, length in zip(reversed(rates), reversed(lengths), strict=True):
        # Transposed convolution of stride r, kernel 2r and padding r/2: each output depends on two inputs.
        low, high = low - UNITS_REACH, high + UNITS_REACH
        low = max((low + rate // 2 - 2 * rate + 1) // rate, 0)
        high = min((high - 1 + rate // 2) // rate + 1, length)
        spans.append((low, high))
    return spans[::-1]


class Codebook(nn.Module):
    """Codebook of one level: table and projection to the latent width."""

    def __init__(self, config: SnacConfig) -> None:
        super().__init__()
        self.codebook = nn.Embedding(config.codebook_size, config.codebook_dim)
        self.out_proj = nn.Conv1d(config.codebook_dim, config.latent, 1)

    def forward(self, codes: Tensor) -> Tensor:
        projected: Tensor = self.out_proj(self.codebook(codes).transpose(1, 2))
        return projected


class Quantizer(nn.Module):
    """Sum of three levels of codes, each repeated to the finest rate."""

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
        """Return the quantizer's output, float32 [B, latent, 4 * frames]. levels: int64 [B, frames * (1 | 2 | 4)]."""
        latent: Tensor = self.quantizer(levels)
        return latent

    def decode(
        self,
        levels: Sequence[Tensor],
        noise: Sequence[Tensor] | None = None,
        keep: tuple[int, int] | None = None,
    ) -> Tensor:
        """Decode whole frames, or only what the samples `keep` (first, end) need.

        levels: int64 [B, frames * (1 | 2 | 4)], codes in range. noise: one float32 [B, 1, T] per block (lengths of
        `SnacConfig.noise_lengths`), None for no noise. Returns float32 [B, 1, frames * frame_samples] in (-1, 1).
        """
        samples: Tensor = self.decoder(self.latent(levels), noise, keep)
        return samples


_GAINS = {".parametrizations.weight.original0": ".parametrizations.weight.original1", ".weight_g": ".weight_v"}
ENCODER: Final = "encoder."
"""Prefix of weights for encoding only."""


def decoding_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the decoding half of a published state dict, in float32 with folded weight normalization.

    The effective weight is g * v / |v|, with the norm over all dimensions but the first (the input channel for a
    transposed convolution). Encoder and `in_proj` are skipped. Raises WeightsError for a gain without its direction.
    """
    decoder = {k: v.float() for k, v in state.items() if not k.startswith(ENCODER) and ".in_proj." not in k}
    folded: dict[str, Tensor] = {}
    for key, value in decoder.items():
        gain = next((suffix for suffix in _GAINS if key.endswith(suffix)), None)
        if gain is not None:
            stem = key.removesuffix(gain)
            folded[f"{stem}.weight"] = _folded(value, decoder, stem + _GAINS[gain])
        elif not key.endswith(tuple(_GAINS.values())):
            folded[key] = value
    return folded


def _folded(gain: Tensor, state: Mapping[str, Tensor], direction: str) -> Tensor:
    if direction not in state:
        raise WeightsError(
            f"the vocoder's weights lack {direction}", "its gain is present", "download the file again", key=direction
        )
    v = state[direction]
    length: Tensor = torch.linalg.vector_norm(v, dim=tuple(range(1, v.dim())), keepdim=True)
    return gain * v / length
