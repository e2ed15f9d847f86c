"""Checks of outputs: the speed of a broken output means nothing. Pure functions over decoded answers."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from mstarctl.bench.client.answers import Answer, Chunk

SILENCE_DBFS: Final = -60.0
FLOATS: Final = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "f32": "<f4", "f64": "<f8", "f16": "<f2"}


def flaw(answer: Answer, outputs: Sequence[str], expected: Mapping[str, Any]) -> str:
    """Return what is wrong with a complete answer, empty if nothing. The answer must have its data."""
    for kind in outputs:
        chunks = [chunk for chunk in answer.chunks if chunk.kind == kind]
        if not chunks and kind not in ("tensor", "scalar"):
            return f"no {kind} came"
        defect = _flaw_of(kind, chunks, expected)
        if defect:
            return defect
    return "" if answer.chunks else "the answer is empty"


def _flaw_of(kind: str, chunks: Sequence[Chunk], expected: Mapping[str, Any]) -> str:
    match kind:
        case "text":
            return "" if b"".join(chunk.data for chunk in chunks).strip() else "the text is empty"
        case "audio":
            return sound_flaw(b"".join(chunk.data for chunk in chunks))
        case "image":
            return next(filter(None, (image_flaw(chunk.data, expected.get("size")) for chunk in chunks)), "")
        case "action" | "tensor" | "scalar":
            return next(filter(None, (array_flaw(chunk, expected.get("shape")) for chunk in chunks)), "")
        case _:
            return ""


def sound_flaw(pcm: bytes) -> str:
    """Return the flaw of 16-bit PCM: a broken sample, or silence."""
    if len(pcm) % 2:
        return "the audio ends within a sample"
    samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
    level = float(np.sqrt(np.mean(samples**2))) if len(samples) else 0.0
    if level <= 10 ** (SILENCE_DBFS / 20):
        return f"the audio is silent (RMS {20 * np.log10(max(level, 1e-9)):.0f} dBFS)"
    return ""


def image_flaw(data: bytes, size: Sequence[int] | None) -> str:
    """Return the flaw of a PNG: it cannot be decoded, has another size, or has one colour. Other formats pass."""
    if not data.startswith(b"\x89PNG"):
        return "" if data.startswith((b"\xff\xd8\xff", b"RIFF")) else "the image has an unknown format"
    try:
        width, height = struct.unpack(">II", data[16:24])
        rows = zlib.decompress(b"".join(_png_data(data)))
    except (struct.error, zlib.error) as error:
        return f"the image cannot be decoded: {error}"
    if size is not None and [width, height] != list(size):
        return f"the image has {width}x{height} pixels, not {size[0]}x{size[1]}"
    pixels = np.frombuffer(rows, np.uint8)
    # Every filter turns an image of one colour into rows that are alike, apart from the first ones.
    if len(rows) % height == 0 and height > 2 and not np.any(np.diff(pixels.reshape(height, -1)[1:], axis=0)):
        inner = pixels.reshape(height, -1)[1][1:]
        if not np.any(inner) or not np.any(np.diff(inner.reshape(width, -1), axis=0)):
            return "the image has one colour"
    return ""


def _png_data(data: bytes) -> list[bytes]:
    chunks, at = [], 8
    while at + 8 <= len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            chunks.append(data[at + 8 : at + 8 + size])
        at += 12 + size
    return chunks


def array_flaw(chunk: Chunk, shape: Sequence[int] | None) -> str:
    """Return the flaw of numbers: not finite, another shape, or bytes that do not fit the shape."""
    kind = FLOATS.get(str(chunk.about.get("dtype", "")))
    if kind is None:
        return ""
    if chunk.size_bytes % np.dtype(kind).itemsize:
        return f"{chunk.kind} ends within a number"
    values = np.frombuffer(chunk.data, kind)
    told = chunk.about.get("shape")
    if told is not None and int(np.prod(told)) != len(values):
        return f"{chunk.kind} has {len(values)} numbers for shape {told}"
    if shape is not None and told is not None and list(told) != list(shape):
        return f"{chunk.kind} has shape {told}, not {list(shape)}"
    return "" if np.isfinite(values).all() else f"{chunk.kind} contains numbers that are not finite"
