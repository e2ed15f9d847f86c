"""Log-mel spectrograms of 16 kHz clips on the device of the audio encoder, for several clips at once.

Source: features of Whisper, which other audio encoders take too. Windowed DFT and sums are float64: ten bits more than
float32 needs, because the logarithm spans eight decades of power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from mstar_core.families.mel_tables import HOP, LEAST_POWER, LENGTH, RANGE, frames_of, mel_filters, windowed_dft

if TYPE_CHECKING:
    from torch import Tensor

MOST_FRAMES: Final = 65_536
"""Frames of one pass, which bounds its memory: one tensor of it takes 0.2 GB."""


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
        parts = [_levels(part, dft, filters) for part in pieces.split(max(1, MOST_FRAMES // len(clips)), dim=1)]
        levels = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        counts = torch.tensor([frames_of(length) for length in lengths]).to(device, non_blocking=True)
        is_inside = (torch.arange(most, device=device) < counts[:, None])[:, :, None]
        loudest = levels.masked_fill(~is_inside, -math.inf).amax((1, 2), keepdim=True)
        return ((levels.maximum(loudest - RANGE) + 4.0) / 4.0).masked_fill(~is_inside, 0.0)

    def _padded(self, clips: Sequence[Tensor], width: int) -> Tensor:
        """Return clips with LENGTH / 2 mirrored samples on both sides: float64 [B, width]."""
        device, lengths = clips[0].device, [len(clip) for clip in clips]
        starts = np.cumsum([0, *lengths[:-1]])
        sizes = torch.from_numpy(np.array([lengths, starts], dtype=np.int64)).to(device, non_blocking=True)
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


def _levels(pieces: Tensor, dft: Tensor, filters: Tensor) -> Tensor:
    """Return the decimal logarithm of the power of each mel bin: float32 [B, frames, bins]."""
    real, imaginary = (pieces @ dft).square().chunk(2, dim=-1)
    return ((real + imaginary) @ filters).clamp(min=LEAST_POWER).log10().float()
