"""Audio of the client: a whole sound in memory, and a WAV file that grows while audio arrives. Samples are PCM16."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Literal

from mstar_core.client.arrays import array_of
from mstar_core.closing import Closing
from mstar_core.codec import SAMPLE_BYTES, WAV_HEADER_BYTES, wav_header

if TYPE_CHECKING:
    from mstar_core.client.arrays import Array

FULL_SCALE: Final = 32768.0
SIZE_LIMIT: Final = 0xFFFFFFFF - WAV_HEADER_BYTES
"""Largest size of samples in a RIFF file, in bytes."""


@dataclass(frozen=True, slots=True)
class AudioBuffer:
    """A sound. pcm: PCM16 little endian, interleaved channels. sample_rate: samples per second of one channel."""

    pcm: bytes
    sample_rate: int
    channels: int = 1

    def __len__(self) -> int:
        """Return the number of samples of one channel."""
        return len(self.pcm) // (SAMPLE_BYTES * self.channels)

    def __bool__(self) -> bool:
        """Return True even without samples: an empty sound is an answer."""
        return True

    @property
    def seconds(self) -> float:
        return len(self) / self.sample_rate

    def to_numpy(self, dtype: Literal["int16", "float32"] = "int16") -> Array:
        """Return [samples], or [samples, channels] for several channels. float32 values lie in [-1, 1).

        Raises UsageError without numpy.
        """
        flat = array_of(self.pcm, {"dtype": "int16"})
        samples = flat if self.channels == 1 else flat.reshape(-1, self.channels)
        return samples if dtype == "int16" else samples.astype("float32") / FULL_SCALE

    def wav_bytes(self) -> bytes:
        """Return the sound as a WAV file."""
        return wav_header(self.sample_rate, self.channels, len(self.pcm)) + self.pcm

    def to_wav(self, path: str | os.PathLike[str]) -> Path:
        """Write a WAV file; an existing file is replaced."""
        target = Path(path)
        target.write_bytes(self.wav_bytes())
        return target


class WavFile(Closing):
    """Writes PCM16 little endian samples into a file that is valid after `close`. Owned by its creator.

    A stream that cannot seek (a pipe) keeps sizes that mean "unknown".
    """

    def __init__(self, file: BinaryIO, rate: int, channels: int = 1) -> None:
        self._file = file
        self._rate = rate
        self._channels = channels
        self._can_seek = file.seekable()
        self.size_bytes = 0
        file.write(wav_header(rate, channels, 0 if self._can_seek else None))

    @classmethod
    def create(cls, path: Path, rate: int, channels: int = 1) -> WavFile:
        """Open a new file at `path`; an existing file is replaced."""
        return cls(path.open("wb"), rate, channels)

    @property
    def seconds(self) -> float:
        """Length of the audio so far."""
        return self.size_bytes / (SAMPLE_BYTES * self._channels * self._rate)

    def write(self, pcm: bytes) -> None:
        """Append samples and flush them, so that a player can follow. Raises ValueError beyond 4 GiB."""
        if self.size_bytes + len(pcm) > SIZE_LIMIT and self._can_seek:
            raise ValueError("a WAV file cannot hold more than 4 GiB")
        self._file.write(pcm)
        self._file.flush()
        self.size_bytes += len(pcm)

    def close(self) -> None:
        """Write the final sizes and close the file. Safe to call twice."""
        if self._file.closed:
            return
        if self._can_seek:
            self._file.seek(0)
            self._file.write(wav_header(self._rate, self._channels, self.size_bytes))
        self._file.close()
