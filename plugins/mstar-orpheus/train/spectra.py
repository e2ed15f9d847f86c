"""Mel spectra and the multi-scale spectral loss of the codec."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch

from .voices import RATE

if TYPE_CHECKING:
    from torch import Tensor

SCALES: Final = ((256, 32), (512, 64), (1024, 80), (2048, 120))
"""FFT sizes and mel bands of the loss; the hop is a quarter."""
FLOOR: Final = 1e-4


def spectrum(samples: Tensor, size: int, hop: int) -> Tensor:
    """Return the complex spectrum [B, size / 2 + 1, N / hop + 1] with a Hann window. samples: [B, N]."""
    window = torch.hann_window(size, device=samples.device)
    return torch.stft(samples, size, hop, window=window, return_complex=True)


def log_mel(samples: Tensor, size: int, hop: int, bands: int) -> Tensor:
    """Return the log-magnitude mel spectrum [B, bands, N / hop + 1]. samples: [B, N]."""
    magnitude = spectrum(samples, size, hop).abs()
    filters = mel_filters(size, bands, str(samples.device))
    return (filters @ magnitude).clamp(min=FLOOR).log()


@lru_cache(maxsize=16)
def mel_filters(size: int, bands: int, device: str) -> Tensor:
    """Return triangular filters [bands, size / 2 + 1] on the mel scale 2595 log10(1 + f / 700)."""
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, bands + 2) / 2595) - 1)
    bins = torch.linspace(0, RATE / 2, size // 2 + 1)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    filters = torch.minimum(rising, falling).clamp(min=0)
    return (filters * (2 / size)).to(device)


def mel_loss(made: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean absolute distance of log-mel spectra over all scales. made, wanted: [B, N]."""
    parts = [
        (log_mel(made, size, size // 4, bands) - log_mel(wanted, size, size // 4, bands)).abs().mean()
        for size, bands in SCALES
    ]
    return torch.stack(parts).mean()
