"""Resampling of sound that arrives in pieces, with soxr."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mstar_core.api.realtime.sound.formats import Pcm

QUALITY: Final = "HQ"
"""As `resampled` of the media readers. It delays sound of 24 kHz by at most 40 ms, and of 8 kHz by 120 ms."""


class PieceResampler:
    """Converts samples [n] from one rate to another. Pieces keep their order; `flush` returns the delayed rest."""

    def __init__(self, have: int, want: int) -> None:
        self._rates = have, want
        self._stream: Any = None
        self._begin()

    def push(self, samples: Pcm) -> Pcm:
        """Return what can be computed of the sound so far."""
        return samples if self._stream is None else self._run(samples, is_last=False)

    def flush(self) -> Pcm:
        """Return the rest. The next piece begins another sound."""
        if self._stream is None:
            return np.zeros(0, np.int16)
        rest = self._run(np.zeros(0, np.int16), is_last=True)
        self._begin()
        return rest

    def _begin(self) -> None:
        have, want = self._rates
        if have == want:
            return
        import soxr

        self._stream = soxr.ResampleStream(have, want, 1, dtype="int16", quality=QUALITY)

    def _run(self, samples: Pcm, *, is_last: bool) -> Pcm:
        made: Pcm = self._stream.resample_chunk(samples, last=is_last)
        return made


def resampled_whole(samples: Pcm, have: int, want: int) -> Pcm:
    """Return a whole sound at another rate."""
    stream = PieceResampler(have, want)
    return np.concatenate([stream.push(samples), stream.flush()])
