"""Attention windows of a sound, keyed by the values that the audio encoder reads (specification section 5).

A window of a growing sound is the same until its loudest value rises so far that the floor of its frames does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from mstar_core.families.mel_tables import HOP, LEAST_POWER, LENGTH, RANGE, frames_of, mel_filters
from mstar_core.plugin.processor import content_key

if TYPE_CHECKING:
    import numpy.typing as npt

    from mstar_qwen3omni.request.sounds import Samples

    Frames = npt.NDArray[np.float32]


def sound_windows(samples: Samples, bins: int, window: int) -> Iterator[tuple[Frames, bytes]]:
    """Yield the log-mel frames of each window of a sound, float32 [bins, f], and their key.

    samples: float32 [1, s] at 16 kHz, more than one window. window: frames.
    """
    levels = _levels(samples[0], bins, window)
    floor = max(float(part.max()) for part in levels) - np.float32(RANGE)
    for number, part in enumerate(levels):
        frames = np.ascontiguousarray(((np.maximum(part, np.float32(floor)) + 4) / 4).T, dtype=np.float32)
        yield frames, content_key("sound window", number > 0, frames.shape[1], frames.tobytes())


def _levels(sound: npt.NDArray[np.float32], bins: int, window: int) -> list[Frames]:
    """Return log10 of the mel powers of each window, float32 [f, bins].

    Each window is one product, so that the bits of its values do not depend on the length of the sound.
    """
    place = np.arange(LENGTH)
    hann = 0.5 - 0.5 * np.cos(2.0 * np.pi * place / LENGTH)
    filters = mel_filters(bins)
    padded = np.pad(sound.astype(np.float64), LENGTH // 2, mode="reflect")
    pieces = np.lib.stride_tricks.sliding_window_view(padded, LENGTH)[::HOP][: frames_of(len(sound))]
    parts = []
    for start in range(0, len(pieces), window):
        spectrum = np.fft.rfft(pieces[start : start + window] * hann, axis=1)
        power = spectrum.real**2 + spectrum.imag**2
        parts.append(np.log10(np.maximum(power @ filters, LEAST_POWER)).astype(np.float32))
    return parts
