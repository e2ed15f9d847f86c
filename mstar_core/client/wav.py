"""A WAV file that grows while sound arrives and is valid at every end: PCM16, sizes written once they are known."""

from __future__ import annotations

import struct
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

HEADER_BYTES: Final = 44
SIZE_LIMIT: Final = 0xFFFFFFFF - HEADER_BYTES
"""Bytes of samples that a RIFF file can tell of."""

UNKNOWN: Final = 0xFFFFFFFF
_SAMPLE_BYTES: Final = 2


def wav_header(rate: int, channels: int, size_bytes: int | None) -> bytes:
    """The 44 bytes before the samples. size_bytes: of the samples; None: not known, as in a stream."""
    data = UNKNOWN if size_bytes is None else size_bytes
    riff = UNKNOWN if size_bytes is None else size_bytes + HEADER_BYTES - 8
    block = channels * _SAMPLE_BYTES
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        riff,
        b"WAVE",
        b"fmt ",
        16,
        1,
        channels,
        rate,
        rate * block,
        block,
        16,
        b"data",
        data,
    )


class WavFile:
    """Writes PCM16 little endian samples. Owned by whoever opened it; `close` makes the sizes true.

    A stream that cannot seek (a pipe) keeps sizes that say "unknown".
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
        """A new file at `path`, in place of what is there."""
        return cls(path.open("wb"), rate, channels)

    @property
    def seconds(self) -> float:
        """Length of the sound so far."""
        return self.size_bytes / (_SAMPLE_BYTES * self._channels * self._rate)

    def write(self, pcm: bytes) -> None:
        """Append samples and hand them to the system, so that a player may follow. Raises ValueError beyond 4 GiB."""
        if self.size_bytes + len(pcm) > SIZE_LIMIT and self._can_seek:
            raise ValueError("a WAV file cannot hold more than 4 GiB")
        self._file.write(pcm)
        self._file.flush()
        self.size_bytes += len(pcm)

    def close(self) -> None:
        """Write the true sizes and close. Safe to call twice."""
        if self._file.closed:
            return
        if self._can_seek:
            self._file.seek(0)
            self._file.write(wav_header(self._rate, self._channels, self.size_bytes))
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
