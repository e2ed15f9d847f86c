"""Turns of the user that are not spoken into a microphone: a text, or a sound file."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mstar_core.errors import ConfigError
from mstarctl.client.realtime import RATE

if TYPE_CHECKING:
    import numpy as np

SHORTEST_S: Final = 0.1
"""The server commits no less sound."""


@dataclass(frozen=True, slots=True)
class TextTurn:
    """A typed message."""

    text: str


@dataclass(frozen=True, slots=True)
class SoundTurn:
    """A recorded message. pcm: mono PCM16 of 24 kHz."""

    name: str
    pcm: bytes

    @property
    def seconds(self) -> float:
        return len(self.pcm) / 2 / RATE


Turn = TextTurn | SoundTurn


def pieces(pcm: bytes, seconds: float) -> Iterator[bytes]:
    """Yield a sound in pieces of this length."""
    size = 2 * round(seconds * RATE)
    for start in range(0, len(pcm), size):
        yield pcm[start : start + size]


def read_turn(path: Path) -> SoundTurn:
    """Read a WAV file of 16 bits, any rate, any channels. Raises ConfigError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read", error.strerror or str(error), file=str(path), key="in") from error
    return turn_of(path, data)


def turn_of(path: Path, content: bytes) -> SoundTurn:
    """Return the sound of a WAV file of 16 bits. path: of its name alone. Raises ConfigError."""
    try:
        with wave.open(io.BytesIO(content), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise _not_wav(path, str(error) or "the file is cut") from error
    if width != 2:
        raise _not_wav(path, f"its samples have {8 * width} bits")
    turn = SoundTurn(path.name, pcm24(data, rate, channels))
    if turn.seconds < SHORTEST_S:
        raise ConfigError(
            f"{path} has {turn.seconds:.3f} s of sound", hint=f"at least {SHORTEST_S} s", file=str(path), key="in"
        )
    return turn


def _not_wav(path: Path, why: str) -> ConfigError:
    hint = f"convert it: ffmpeg -i {path.name} -ac 1 -ar {RATE} -c:a pcm_s16le turn.wav"
    return ConfigError(f"{path} is not a WAV file of 16 bits", why, hint, file=str(path), key="in")


def pcm24(data: bytes, rate: int, channels: int) -> bytes:
    """Return PCM16 of any rate, interleaved channels, as mono PCM16 of 24 kHz."""
    import numpy as np

    frames = np.frombuffer(data[: len(data) // (2 * channels) * 2 * channels], "<i2").reshape(-1, channels)
    mono = frames.mean(axis=1)
    samples = mono if rate == RATE or not len(mono) else _resampled(mono, rate)
    return bytes(np.clip(np.rint(samples), -32768, 32767).astype("<i2").tobytes())


def _resampled(samples: np.ndarray[Any, Any], rate: int) -> np.ndarray[Any, Any]:
    """Resample a whole sound by its spectrum, which needs no package besides numpy. samples: [n] float64."""
    import numpy as np

    count = max(1, round(len(samples) * RATE / rate))
    return np.fft.irfft(np.fft.rfft(samples), count) * (count / len(samples))
