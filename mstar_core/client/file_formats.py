"""Formats of files that answers are saved to. The ending of the name decides; other endings are refused.

Pillow and PyAV are imported only for formats that the server does not send.
"""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

from mstar_core.client.audio import AudioBuffer, WavFile
from mstar_core.errors import UsageError
from mstar_core.sound_files import FORMATS, AudioFormat, AvEncoder, can_encode, encode_whole

if TYPE_CHECKING:
    import numpy as np

IMAGES: Final = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
"""Names of image formats by ending."""

SOUNDS: Final = {
    ".wav": FORMATS["wav"],
    ".pcm": FORMATS["pcm"],
    ".mp3": FORMATS["mp3"],
    ".flac": FORMATS["flac"],
    ".opus": FORMATS["opus"],
    ".ogg": FORMATS["opus"],
}
"""Sound formats by ending."""

_SIGNATURES: Final = {"PNG": b"\x89PNG", "JPEG": b"\xff\xd8\xff", "WEBP": b"RIFF"}
QUALITY: Final = 92


def image_file(data: bytes, path: Path) -> bytes:
    """Return an image in the format of the ending of `path`. Raises UsageError as `check_image`."""
    check_image(path)
    format_name = IMAGES[path.suffix.lower()]
    if data.startswith(_SIGNATURES[format_name]):
        return data
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        encoded = io.BytesIO()
        (image if format_name != "JPEG" or image.mode in ("RGB", "L") else image.convert("RGB")).save(
            encoded, format_name, quality=QUALITY
        )
    return encoded.getvalue()


def check_image(path: Path) -> None:
    """Raise UsageError for an ending that no image is written to, or if it needs Pillow, which is not installed."""
    suffix = path.suffix.lower()
    if suffix not in IMAGES:
        raise UsageError(f"no image is written to {path.name}", hint=f"endings: {' '.join(IMAGES)}")
    if IMAGES[suffix] != "PNG" and importlib.util.find_spec("PIL") is None:
        raise UsageError(
            f"{suffix} files need Pillow, which is not installed", hint=f"write {path.with_suffix('.png')}"
        )


def sound_format(path: Path) -> AudioFormat:
    """Return the format of a sound file. Raises UsageError for another ending, or if its encoder is not installed."""
    suffix = path.suffix.lower()
    if suffix not in SOUNDS:
        raise UsageError(f"no sound is written to {path.name}", hint=f"endings: {' '.join(SOUNDS)}")
    if SOUNDS[suffix].codec and not can_encode(SOUNDS[suffix]):
        raise UsageError(
            f"{suffix} files need PyAV with {SOUNDS[suffix].codec}, which is not installed",
            hint=f"write {path.with_suffix('.wav')}",
        )
    return SOUNDS[suffix]


def sound_file(sound: AudioBuffer, path: Path) -> bytes:
    """Return a sound in the format of the ending of `path`. Raises UsageError as `sound_format`."""
    return encode_whole(sound_format(path), sound.pcm, sound.sample_rate, sound.channels)


class FilmWriter(Protocol):
    """Writes frames, uint8 [F, height, width, 3], to an MP4 file; `close` completes it."""

    def add(self, frames: np.ndarray) -> None: ...

    def close(self) -> None: ...


def film_writer(path: Path, width: int, height: int, rate: int) -> FilmWriter:
    """Return the writer of an MP4 file. rate: frames per second. Raises UsageError without PyAV."""
    if importlib.util.find_spec("av") is None:
        raise UsageError(
            f"{path.suffix} files need PyAV, which is not installed", hint=f"write {path.with_suffix('.npy')}"
        )
    from mstar_core.video_files import Film

    return Film(path, width, height, rate)


class SoundWriter(Protocol):
    """Writes PCM16 to a file as it arrives; `close` completes and closes the file."""

    def write(self, pcm: bytes) -> None: ...

    def close(self) -> None: ...


def sound_writer(form: AudioFormat, file: BinaryIO, rate: int, channels: int) -> SoundWriter:
    """Return the writer of one format. It owns the file."""
    if form.name == "wav":
        return WavFile(file, rate, channels)
    return _Encoded(form, file, rate, channels)


class _Encoded:
    """Raw PCM, or frames of an encoder."""

    def __init__(self, form: AudioFormat, file: BinaryIO, rate: int, channels: int) -> None:
        self._file = file
        self._encoder = AvEncoder(form, rate, channels, file) if form.codec else None

    def write(self, pcm: bytes) -> None:
        if self._encoder is None:
            self._file.write(pcm)
        else:
            self._encoder.push(pcm)
        self._file.flush()

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            if self._encoder is not None:
                self._encoder.end()
        finally:
            self._file.close()
