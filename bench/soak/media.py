"""Media files with bytes that were never sent before and the same content."""

from __future__ import annotations

import random
import struct
import zlib
from typing import Final

PNG: Final = b"\x89PNG\r\n\x1a\n"
HEAD: Final = len(PNG) + 25
"""Bytes of a PNG file up to the end of its first chunk."""


def unseen(data: bytes, draws: random.Random) -> bytes:
    """Return a PNG, WAV or MP4 file with a comment of random bytes; other files as they are."""
    comment = b"soak" + draws.randbytes(12)
    if data.startswith(PNG):
        return data[:HEAD] + _chunk(b"tEXt", b"Comment\0" + comment.hex().encode()) + data[HEAD:]
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        size = struct.unpack("<I", data[4:8])[0] + 8 + len(comment)
        return data[:4] + struct.pack("<I", size) + data[8:] + b"junk" + struct.pack("<I", len(comment)) + comment
    if data[4:8] == b"ftyp":
        return data + struct.pack(">I", 8 + len(comment)) + b"free" + comment
    return data


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
