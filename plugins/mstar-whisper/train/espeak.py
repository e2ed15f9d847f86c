"""espeak-ng through its C library: the voice that `orpheus:mini` learned from. Needs the wheel `espeakng-loader`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import soxr

from mstar_whisper.checkpoint.config import RATE

_SYNCHRONOUS: Final = 2
_UTF8: Final = 1
_RATE, _PITCH, _RANGE = 1, 3, 4
_CALLBACK: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """Settings of espeak-ng. words_per_minute: speed. pitch, pitch_range: 0 to 100. name: its voice."""

    name: str = "en-us"
    words_per_minute: int = 155
    pitch: int = 42
    pitch_range: int = 40


class Espeak:
    """One espeak-ng per process, because the library has global state. Raises ImportError without the wheel."""

    def __init__(self) -> None:
        import espeakng_loader

        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        self._rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, str(espeakng_loader.get_data_path()).encode(), 0)
        if self._rate <= 0:
            raise OSError(f"espeak_Initialize returned {self._rate}")
        self._parts: list[np.ndarray] = []
        self._callback = _CALLBACK(self._receive)  # kept: the library holds only the address
        self._library.espeak_SetSynthCallback(self._callback)

    def speak(self, text: str, voice: Voice) -> np.ndarray:
        """Return the text spoken, int16 [samples] at 16 kHz."""
        self._library.espeak_SetVoiceByName(voice.name.encode())
        settings = {_RATE: voice.words_per_minute, _PITCH: voice.pitch, _RANGE: voice.pitch_range}
        for parameter, value in settings.items():
            self._library.espeak_SetParameter(parameter, value, 0)
        self._parts = []
        data = text.encode()
        code = self._library.espeak_Synth(data, ctypes.c_size_t(len(data) + 1), 0, 0, 0, _UTF8, None, None)
        if code != 0:
            raise OSError(f"espeak_Synth returned {code} for {text!r}")
        whole = np.concatenate([np.zeros(0, np.int16), *self._parts])
        return np.asarray(soxr.resample(whole, self._rate, RATE), dtype=np.int16)

    def _receive(self, samples: Any, count: int, events: int) -> int:
        if samples and count > 0:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0
