"""Mel spectra, and the multi-scale spectral loss of the codec."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

RATE: Final = 24_000
"""Samples per second of all sounds here."""

SCALES: Final = ((128, 20), (256, 32), (512, 64), (1024, 80), (2048, 120))
"""DFT lengths and mel bands of the loss. The hop is a quarter."""

FLOOR: Final = 3e-4


def log_mel(samples: Tensor, size: int, hop: int, bands: int) -> Tensor:
    """Return the logarithm of the mel magnitudes: [B, bands, N / hop + 1]. samples: [B, N] at 24 kHz."""
    window = torch.hann_window(size, device=samples.device)
    spectrum = torch.stft(samples, size, hop, window=window, return_complex=True)
    magnitude = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
    return (mel_filters(size, bands, str(samples.device)) @ magnitude).clamp(min=FLOOR).log()


@lru_cache(maxsize=16)
def mel_filters(size: int, bands: int, device: str) -> Tensor:
    """Return triangular filters on the mel scale 2595 log10(1 + f / 700): [bands, size / 2 + 1]."""
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, top, bands + 2) / 2595) - 1)
    lines = torch.linspace(0, RATE / 2, size // 2 + 1)
    width = (corners[1:] - corners[:-1]).clamp(min=RATE / size)  # a band has one line at least
    rising = 1 - (corners[1:-1, None] - lines).clamp(min=0) / width[:-1, None]
    falling = 1 - (lines - corners[1:-1, None]).clamp(min=0) / width[1:, None]
    return (torch.minimum(rising, falling).clamp(min=0) * (2 / size)).to(device)


def mel_loss(made: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean absolute distance of log-mel spectra over all scales. made, wanted: [B, N]."""
    parts = [
        (log_mel(made, size, size // 4, bands) - log_mel(wanted, size, size // 4, bands)).abs().mean()
        for size, bands in SCALES
    ]
    return torch.stack(parts).mean()
