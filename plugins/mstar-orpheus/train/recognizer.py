"""Speech recognition by pocketsphinx, whose wheel brings its English model. It is independent of this project."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import soxr

from .sentences import plain
from .voices import RATE

HEARING_RATE: Final = 16000
NOISE: Final = 1e-3
"""Standard deviation of added noise, because the recognizer breaks on digital zeros."""


class Recognizer:
    """A decoder with its large language model. Raises ImportError without the wheel."""

    def __init__(self) -> None:
        from pocketsphinx import Decoder

        self._open: Any = Decoder(loglevel="FATAL")
        self._closed: Any = Decoder(loglevel="FATAL", lm=None)

    def words(self, samples: np.ndarray) -> list[str]:
        """Return the words heard, of any text. samples: float or int16 [n] at 24 kHz."""
        return _heard(self._open, _audible(samples))

    def choice(self, samples: np.ndarray, texts: Sequence[str]) -> int | None:
        """Return the index of the text that was heard, None if none fits."""
        self._closed.add_jsgf_string("choice", grammar(texts))
        self._closed.activate_search("choice")
        heard = " ".join(_heard(self._closed, _audible(samples)))
        known = [plain(text) for text in texts]
        return known.index(heard) if heard in known else None


def grammar(texts: Sequence[str]) -> str:
    """Return a JSGF grammar of whole sentences."""
    return "#JSGF V1.0; grammar choice; public <choice> = " + " | ".join(f"( {plain(text)} )" for text in texts) + " ;"


def _audible(samples: np.ndarray) -> bytes:
    scaled = samples.astype(np.float32) / (32768 if samples.dtype == np.int16 else 1)
    slow = soxr.resample(scaled, RATE, HEARING_RATE)
    noisy = slow + np.random.default_rng(0).normal(0, NOISE, len(slow))
    whole: bytes = (noisy.clip(-1, 1) * 32767).astype("<i2").tobytes()
    return whole


def _heard(decoder: Any, audio: bytes) -> list[str]:
    decoder.start_utt()
    decoder.process_raw(audio, full_utt=True)
    decoder.end_utt()
    found = decoder.hyp()
    return found.hypstr.split() if found is not None else []


def word_errors(wanted: Sequence[str], heard: Sequence[str]) -> int:
    """Return the least number of words changed, added or left out."""
    row = list(range(len(heard) + 1))
    for place, word in enumerate(wanted, start=1):
        above, row = row, [place]
        for column, other in enumerate(heard, start=1):
            row.append(min(above[column] + 1, row[-1] + 1, above[column - 1] + (word != other)))
    return row[-1]
