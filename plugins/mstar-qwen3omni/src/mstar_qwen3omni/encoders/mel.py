"""Log-mel spectrograms of 16 kHz clips on the device of the audio encoder, for several clips at once.

Source: specification section 5, features. Windowed DFT and sums are float64: ten bits more than float32 needs, because
the logarithm spans eight decades of power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from mstar_core.engine.transfers import upload

if TYPE_CHECKING:
    from torch import Tensor

RATE: Final = 16_000
HOP: Final = 160
LENGTH: Final = 400
"""Samples of one DFT."""

MOST_FRAMES: Final = 65_536
"""Frames of one pass over several clips, which bounds its memory: one tensor of it takes 0.2 GB."""

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


class LogMel(nn.Module):
    """Spectrograms of clips. The tables are made on the first call on each device, in float64 for every model dtype."""

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins = bins
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(self, clips: Sequence[Tensor]) -> Tensor:
        """Return spectrograms, zero behind a clip's end: float32 [B, most frames, bins]. clips: samples [s] each."""
        if clips[0].device.type == "cpu":
            # One by one, so that a clip's bits do not depend on the others.
            return pad_sequence([self._spectra([clip])[0] for clip in clips], batch_first=True)
        step = max(1, MOST_FRAMES // max(1, *(frames_of(len(clip)) for clip in clips)))
        parts = [self._spectra(clips[start : start + step]) for start in range(0, len(clips), step)]
        if len(parts) == 1:
            return parts[0]
        return pad_sequence([spectrum for part in parts for spectrum in part], batch_first=True)

    def _spectra(self, clips: Sequence[Tensor]) -> Tensor:
        device, lengths = clips[0].device, [len(clip) for clip in clips]
        most = max(map(frames_of, lengths))
        if not most:
            return torch.zeros(len(clips), 0, self.bins, device=device)
        dft, filters = self._tables_on(device)
        pieces = self._padded(clips, (most - 1) * HOP + LENGTH).unfold(1, LENGTH, HOP)
        real, imaginary = (pieces @ dft).square().chunk(2, dim=-1)
        levels = ((real + imaginary) @ filters).clamp(min=LEAST_POWER).log10().float()
        counts = upload(torch.tensor([frames_of(length) for length in lengths]), device)
        is_inside = (torch.arange(most, device=device) < counts[:, None])[:, :, None]
        loudest = levels.masked_fill(~is_inside, -math.inf).amax((1, 2), keepdim=True)
        return ((levels.maximum(loudest - RANGE) + 4.0) / 4.0).masked_fill(~is_inside, 0.0)

    def _padded(self, clips: Sequence[Tensor], width: int) -> Tensor:
        """Return clips with LENGTH / 2 mirrored samples on both sides: float64 [B, width]."""
        device, lengths = clips[0].device, [len(clip) for clip in clips]
        starts = np.cumsum([0, *lengths[:-1]])
        sizes = upload(torch.from_numpy(np.array([lengths, starts], dtype=np.int64)), device)
        last = (sizes[0] - 1)[:, None]
        period = (2 * last).clamp(min=1)
        place = (torch.arange(width, device=device) - LENGTH // 2).remainder(period)
        mirrored = torch.where(place > last, period - place, place).clamp(min=0)
        flat = torch.cat(list(clips)) if len(clips) > 1 else clips[0]
        # The index of an empty clip may be out of range. Clamping is safe, because such a clip has no frames.
        return flat[(mirrored + sizes[1][:, None]).clamp(max=len(flat) - 1)].double()

    def _tables_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._tables is None or self._tables[0].device != device:
            dft, filters = torch.from_numpy(windowed_dft()), torch.from_numpy(mel_filters(self.bins))
            self._tables = dft.to(device), filters.to(device)
        return self._tables
