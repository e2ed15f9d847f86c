"""Small real media files of every supported type."""

from __future__ import annotations

import io
import math
import struct
import wave

import av
import numpy as np
from PIL import Image


def image(width: int = 8, height: int = 6, form: str = "PNG", mode: str = "RGB") -> bytes:
    """Return an image file."""
    file = io.BytesIO()
    Image.new(mode, (width, height), 90 if mode != "RGB" else (200, 40, 90)).save(file, form)
    return file.getvalue()


def wav(seconds: float = 0.1, rate: int = 16_000, channels: int = 1) -> bytes:
    """Return a tone as WAV, PCM16."""
    count = int(seconds * rate)
    samples = [int(8000 * math.sin(0.1 * i)) for i in range(count) for _ in range(channels)]
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return file.getvalue()


def coded(form: str, codec: str, seconds: float = 0.5, rate: int = 48_000) -> bytes:
    """Return a tone in the PyAV container `form`."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.layout = "mono"
        tone = (8000 * np.sin(0.05 * np.arange(int(seconds * rate)))).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(tone[None], format="s16", layout="mono")
        frame.sample_rate = rate
        mono = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=rate, frame_size=1024)
        for part in [*mono.resample(frame), *mono.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()


def video(width: int = 32, height: int = 16, frames: int = 10, rate: int = 10, form: str = "mp4") -> bytes:
    """Return a video without audio; frame i is gray of level 20 * i."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as out:
        stream = out.add_stream("mpeg4" if form != "webm" else "libvpx-vp9", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            pixels = np.full((height, width, 3), min(255, 20 * index), np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode(None))
    return file.getvalue()
