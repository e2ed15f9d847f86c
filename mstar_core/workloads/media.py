"""Images, recordings and clips of load tests, synthesised from a random generator without any download."""

from __future__ import annotations

import io
import math
import random
import struct
import zlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

BLOCK: Final = 8
"""Pixels of a block of one colour. Blocks compress well, so that encoding costs little."""


def picture(chance: random.Random, width: int, height: int | None = None) -> bytes:
    """Return a PNG of random blocks, `width` x `height` pixels (square by default)."""
    return _png(_pixels(chance, width, height or width))


def video_array(chance: random.Random, frames: int, side: int) -> bytes:
    """Return a clip as an .npy file of uint8 [frames, 3, side, side]: random blocks that move sideways."""
    import numpy as np

    first = _pixels(chance, side, side).transpose(2, 0, 1)
    clip = np.stack([np.roll(first, 2 * number, axis=2) for number in range(frames)])
    file = io.BytesIO()
    np.save(file, clip)
    return file.getvalue()


def recording(chance: random.Random, seconds: float, rate: int = 16000) -> bytes:
    """Return a mono WAV with a melody of random tones, so that no two recordings share content."""
    import numpy as np

    count = round(seconds * rate)
    note = max(1, rate // 5)
    tones = np.array([chance.uniform(110.0, 440.0) for _ in range(count // note + 1)])
    phase = np.cumsum(np.repeat(tones, note)[:count]) * (2 * math.pi / rate)
    envelope = np.sin(np.linspace(0.0, math.pi, note))
    loud = np.resize(envelope, count)
    pcm = (0.4 * 32767 * np.sin(phase) * loud).astype("<i2")
    head = b"RIFF" + struct.pack("<I", 36 + pcm.nbytes) + b"WAVEfmt "
    return (
        head
        + struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
        + b"data"
        + struct.pack("<I", pcm.nbytes)
        + bytes(pcm)
    )


def _pixels(chance: random.Random, width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    import numpy as np

    rows, columns = -(-height // BLOCK), -(-width // BLOCK)
    blocks = np.frombuffer(chance.randbytes(rows * columns * 3), np.uint8).reshape(rows, columns, 3)
    return blocks.repeat(BLOCK, 0).repeat(BLOCK, 1)[:height, :width]


def _png(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    import numpy as np

    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # the first byte of a row is its filter: none
    rows[:, 1:] = pixels.reshape(height, 3 * width)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
