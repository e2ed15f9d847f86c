"""Audio and video containers, opened by the format of their first bytes."""

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
    """Return FFmpeg's name of the container format of `data`, None for an unsupported one."""
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
    """Open a container, which the caller closes. Raises ValueError for an unsupported kind, av.FFmpegError if broken.

    The format comes from the first bytes and no protocol is allowed, so that a playlist inside cannot open other files
    or addresses.
    """
    import av

    name = container_format(data)
    if name is None:
        raise ValueError("the container format is not supported")
    return av.open(io.BytesIO(data), format=name, options={"protocol_whitelist": "none"})


def seconds_of(container: Any, stream: Any) -> float | None:
    """Return the length of a stream, or of its container; None if neither states it."""
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return None if container.duration is None else container.duration / 1_000_000
