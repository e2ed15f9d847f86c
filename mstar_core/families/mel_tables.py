"""Constants and tables of log-mel spectrograms, without torch. Used by audio encoders and processors.

Source: features of Whisper, which other audio encoders take too.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

RATE: Final = 16_000
HOP: Final = 160
LENGTH: Final = 400
"""Samples of one DFT."""

LEAST_POWER: Final = 1e-10
RANGE: Final = 8.0
"""Decades of power below a clip's loudest value that are kept."""

_LINEAR_HZ, _LINEAR_MELS, _LOG_STEP = 1000.0, 15.0, math.log(6.4) / 27.0


def frames_of(samples: int) -> int:
    """Return the mel frames of a clip."""
    return samples // HOP


def mels(hertz: np.ndarray) -> np.ndarray:
    """Convert frequencies to Slaney's mel scale: linear up to 1 kHz, then logarithmic."""
    above = np.maximum(hertz, _LINEAR_HZ)
    high = _LINEAR_MELS + np.log(above / _LINEAR_HZ) / _LOG_STEP
    return np.where(hertz < _LINEAR_HZ, hertz * (_LINEAR_MELS / _LINEAR_HZ), high)


def hertz(mels: np.ndarray) -> np.ndarray:
    """Return the inverse of `mels`."""
    high = _LINEAR_HZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, mels * (_LINEAR_HZ / _LINEAR_MELS), high)


def mel_filters(bins: int) -> np.ndarray:
    """Return triangular filters of equal area, evenly spaced in mel up to RATE / 2: float64 [LENGTH / 2 + 1, bins]."""
    corners = hertz(np.linspace(0.0, mels(np.array(RATE / 2)), bins + 2))
    lines = np.linspace(0.0, RATE / 2, LENGTH // 2 + 1)[:, None]
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    rising, falling = (lines - low) / (middle - low), (high - lines) / (high - middle)
    shape: np.ndarray = np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (high - low)
    return shape


def windowed_dft() -> np.ndarray:
    """Return the DFT's cosines and sines times a periodic Hann window: float64 [LENGTH, LENGTH + 2]."""
    place = np.arange(LENGTH)
    angle = 2.0 * np.pi / LENGTH * np.outer(place, np.arange(LENGTH // 2 + 1))
    window = 0.5 - 0.5 * np.cos(2.0 * np.pi * place / LENGTH)
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * window[:, None]
