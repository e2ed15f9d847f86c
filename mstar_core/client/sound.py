"""AudioBuffer: sound that is whole, as samples, as a WAV file, as an array. Given back by clients."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mstar_core.client.array import array_of
from mstar_core.client.wav import wav_header

if TYPE_CHECKING:
    from mstar_core.client.array import Array

SAMPLE_BYTES = 2
FULL_SCALE = 32768.0


@dataclass(frozen=True, slots=True)
class AudioBuffer:
    """Sound. pcm: PCM16 little endian, channels interleaved. sample_rate: samples a second of one channel."""

    pcm: bytes
    sample_rate: int
    channels: int = 1

    def __len__(self) -> int:
        """Samples of one channel."""
        return len(self.pcm) // (SAMPLE_BYTES * self.channels)

    def __bool__(self) -> bool:
        """True also where there is no sample: an empty sound is an answer."""
        return True

    @property
    def seconds(self) -> float:
        return len(self) / self.sample_rate

    def to_numpy(self, dtype: Literal["int16", "float32"] = "int16") -> Array:
        """[samples], or [samples, channels] where there are several. float32: in [-1, 1).

        Raises UsageError where numpy is not installed.
        """
        flat = array_of(self.pcm, {"dtype": "int16"})
        made = flat if self.channels == 1 else flat.reshape(-1, self.channels)
        return made if dtype == "int16" else made.astype("float32") / FULL_SCALE

    def wav_bytes(self) -> bytes:
        """A whole WAV file."""
        return wav_header(self.sample_rate, self.channels, len(self.pcm)) + self.pcm

    def to_wav(self, path: str | os.PathLike[str]) -> Path:
        """Write a WAV file, in place of what is there."""
        target = Path(path)
        target.write_bytes(self.wav_bytes())
        return target
