"""Log-mel spectrograms of 24 kHz clips for the speaker encoder (specification section 14)."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from torch import Tensor

RATE: Final = 24_000
LENGTH: Final = 1024
HOP: Final = 256
EDGE: Final = (LENGTH - HOP) // 2
"""Mirrored samples on both sides."""

LEAST: Final = 1e-5
TINY: Final = 1e-9

_LINEAR_HZ, _LINEAR_MELS, _LOG_STEP = 1000.0, 15.0, math.log(6.4) / 27.0


def mels(hertz: np.ndarray) -> np.ndarray:
    """Convert frequencies to Slaney's mel scale: linear up to 1 kHz, then logarithmic."""
    high = _LINEAR_MELS + np.log(np.maximum(hertz, _LINEAR_HZ) / _LINEAR_HZ) / _LOG_STEP
    return np.where(hertz < _LINEAR_HZ, hertz * (_LINEAR_MELS / _LINEAR_HZ), high)


def hertz(mels: np.ndarray) -> np.ndarray:
    """Return the inverse of `mels`."""
    high = _LINEAR_HZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, mels * (_LINEAR_HZ / _LINEAR_MELS), high)


@functools.cache
def mel_filters(bins: int) -> np.ndarray:
    """Return triangular filters of equal area up to RATE / 2: float32 [bins, LENGTH / 2 + 1], computed in float64."""
    corners = hertz(np.linspace(0.0, mels(np.array(RATE / 2)), bins + 2))
    lines = np.linspace(0.0, RATE / 2, LENGTH // 2 + 1)
    low, middle, high = (corners[at : at + bins, None] for at in range(3))
    rising, falling = (lines - low) / (middle - low), (high - lines) / (high - middle)
    shape: np.ndarray = np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (high - low)
    found: np.ndarray = shape.astype(np.float32)
    return found


def log_mel(samples: Tensor, bins: int) -> Tensor:
    """Return the log-mel spectrogram of one clip: float32 [bins, frames]. samples: float32 [n], at least 5 frames."""
    filters = torch.from_numpy(mel_filters(bins)).to(samples.device)
    padded = pad(samples.float()[None, None], (EDGE, EDGE), mode="reflect")[0, 0]
    window = torch.hann_window(LENGTH, device=samples.device)
    lines = torch.stft(padded, LENGTH, HOP, window=window, center=False, return_complex=True)
    magnitude = (lines.real.square() + lines.imag.square() + TINY).sqrt()
    return (filters @ magnitude).clamp(min=LEAST).log()
