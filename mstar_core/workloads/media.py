"""Images, recordings and clips of load tests and samples, synthesised without any download."""

from __future__ import annotations

import io
import math
import random
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from mstar_core.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]

BLOCK: Final = 8
"""Pixels of a block of one colour. Blocks compress well, so that encoding costs little."""


def picture(chance: random.Random, width: int, height: int | None = None) -> bytes:
    """Return a PNG of random blocks, `width` x `height` pixels (square by default)."""
    return png(_pixels(chance, width, height or width))


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


def ball_picture(side: int, along: float, height: float = 0.5) -> Pixels:
    """Return a picture of a red ball on a table, uint8 [side, side, 3]. along, height: its place, each in [0, 1]."""
    import numpy as np

    middle = (np.arange(side) + 0.5) / side
    across, down = np.meshgrid(middle, middle)
    table = np.stack([70 + 60 * across, 80 + 50 * down, np.full_like(across, 110.0)], axis=-1)
    radius = 0.14
    distance = np.hypot(across - (radius + (1 - 2 * radius) * along), down - (1 - radius - (1 - 2 * radius) * height))
    cover = np.clip(0.5 + (radius - distance) * side, 0, 1)[..., None]
    light = np.clip(1.1 - 2 * distance, 0.5, 1.0)[..., None]
    pixels: Pixels = np.rint(table + cover * (light * np.array([220.0, 50.0, 40.0]) - table)).astype(np.uint8)
    return pixels


def ball_clip(frames: int, side: int) -> list[Pixels]:
    """Return the frames of a ball that rolls from left to right."""
    return [ball_picture(side, number / max(1, frames - 1), 0.35) for number in range(frames)]


def clip(frames: Sequence[Pixels], rate: int = 8) -> bytes:
    """Return frames, uint8 [h, w, 3] of even sides, as an MP4 file. Raises UsageError without PyAV."""
    try:
        import av
    except ImportError as error:
        hint = "pip install 'mstarctl[runtime]'"
        raise UsageError("a clip cannot be written", "the package av is not installed", hint) from error
    codec: Any = "libx264" if "libx264" in av.codecs_available else "mpeg4"  # browsers play H.264
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        # See `video_files.QUALITY`: the tree differs from run to run.
        stream = out.add_stream(codec, rate=rate, options={"x264-params": "mbtree=0"} if codec == "libx264" else {})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        stream.thread_count = 1  # the same bytes on every machine
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode(None))
    return file.getvalue()


def _pixels(chance: random.Random, width: int, height: int) -> Pixels:
    import numpy as np

    rows, columns = -(-height // BLOCK), -(-width // BLOCK)
    blocks = np.frombuffer(chance.randbytes(rows * columns * 3), np.uint8).reshape(rows, columns, 3)
    return blocks.repeat(BLOCK, 0).repeat(BLOCK, 1)[:height, :width]


def png(pixels: Pixels) -> bytes:
    """Return a picture, uint8 [h, w, 3], as a PNG file."""
    import numpy as np

    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # the first byte of a row is its filter: none
    rows[:, 1:] = pixels.reshape(height, 3 * width)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
