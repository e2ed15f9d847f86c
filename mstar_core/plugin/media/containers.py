"""Opens sound and video containers by the format that their first bytes say, so that no playlist in one can name
another file, and with no protocol by which it could fetch anything.
"""

from __future__ import annotations

import io
from typing import Any, Final

MAGIC: Final = (
    (b"\x1aE\xdf\xa3", "matroska"),
    (b"OggS", "ogg"),
    (b"fLaC", "flac"),
    (b"ID3", "mp3"),
)


def container_format(data: bytes) -> str | None:
    """FFmpeg's name of the container that `data` begins as; None: nothing that is read here."""
    if data[4:8] == b"ftyp":
        return "mov"
    if data[:4] == b"RIFF":
        return {b"WAVE": "wav", b"AVI ": "avi"}.get(data[8:12])
    for magic, name in MAGIC:
        if data.startswith(magic):
            return name
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        return "aac" if data[1] & 0x06 == 0 else "mp3"  # the layer bits are zero in ADTS alone
    return None


def open_container(data: bytes) -> Any:
    """The container, to be closed by the caller. Raises ValueError for another kind, av.FFmpegError for a broken one.

    Data streams are never read: only the first stream of sound or picture.
    """
    import av

    name = container_format(data)
    if name is None:
        raise ValueError("it is no container that is read here")
    return av.open(io.BytesIO(data), format=name, options={"protocol_whitelist": "none"})
