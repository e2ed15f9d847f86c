"""The source voice: espeak-ng through its C library. Needs the wheel `espeakng-loader`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Pcm = npt.NDArray[np.int16]

_SYNCHRONOUS, _UTF8 = 2, 1
_PARAMETERS: Final = {"words_per_minute": 1, "pitch": 3, "pitch_range": 4}
_RECEIVER: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
SILENCE: Final = 300
"""Loudest sample that is cut off at both ends of a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """Settings of espeak-ng. pitch, pitch_range: 0 to 100."""

    name: str = "en-us"
    words_per_minute: int = 150
    pitch: int = 40
    pitch_range: int = 40


class Espeak:
    """The library, of which a process has one. Raises ImportError without the wheel, OSError if it does not start."""

    def __init__(self) -> None:
        import espeakng_loader

        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        data = str(espeakng_loader.get_data_path()).encode()
        self._rate = int(self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, 0))
        if self._rate <= 0:
            raise OSError(f"espeak_Initialize returned {self._rate}")
        self._parts: list[Pcm] = []
        self._receiver = _RECEIVER(self._receive)  # kept, because the library holds only its address
        self._library.espeak_SetSynthCallback(self._receiver)

    def speak(self, text: str, voice: Voice, rate: int) -> Pcm:
        """Return a text spoken: int16 [samples] at `rate`. Raises OSError if the library fails."""
        return self._resampled(self._spoken(text, voice), rate)

    def word(self, word: str, voice: Voice, rate: int) -> Pcm:
        """Return a spoken word without silence at its ends. See `speak`; raises OSError if there is no sound too."""
        whole = self._spoken(word, voice)
        loud = np.flatnonzero(abs(whole.astype(np.int32)) > SILENCE)
        if not len(loud):
            raise OSError(f"espeak-ng makes no sound for {word!r}")
        return self._resampled(whole[loud[0] : loud[-1] + 1], rate)

    def _resampled(self, samples: Pcm, rate: int) -> Pcm:
        import soxr

        return np.asarray(soxr.resample(samples, self._rate, rate), dtype=np.int16)

    def _spoken(self, text: str, voice: Voice) -> Pcm:
        """Return a text spoken at the rate of the library."""
        self._library.espeak_SetVoiceByName(voice.name.encode())
        for name, number in _PARAMETERS.items():
            self._library.espeak_SetParameter(number, int(getattr(voice, name)), 0)
        self._parts = []
        data = text.encode()
        code = self._library.espeak_Synth(data, ctypes.c_size_t(len(data) + 1), 0, 0, 0, _UTF8, None, None)
        if code != 0:
            raise OSError(f"espeak_Synth returned {code} for {text!r}")
        return np.concatenate([np.zeros(0, np.int16), *self._parts])

    def _receive(self, samples: Any, count: int, events: int) -> int:
        if samples and count > 0:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0
