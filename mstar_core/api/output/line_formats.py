"""Response formats of /generate: NDJSON lines, binary frames, one JSON object. Used by that route."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pybase64

from mstar_core.api.errors import ErrorReply
from mstar_core.api.output.encode import EncodedChunk

NDJSON: Final = "application/x-ndjson; charset=utf-8"
FRAMES: Final = "application/x-mstar-frames"
LINE_BYTES: Final = 12 << 20
"""Payload limit of one line; with base64 a line stays below 16 MiB, the limit of common clients."""

WRITE_BYTES: Final = 1 << 20

UNCOPIED_BYTES: Final = 256 << 10
"""Payloads of at least this size are written without joining: one more socket call, one copy less."""

Data = bytes | memoryview


@dataclass(frozen=True, slots=True)
class LineFormat:
    """Encodes the lines of a streamed response. keepalive: sent in pauses."""

    content_type: str
    keepalive: bytes

    def line(self, modality: str, data: Data, metadata: dict[str, Any]) -> bytes:
        """Return a line."""
        return b"".join(self.buffers(modality, data, metadata))

    def buffers(self, modality: str, data: Data, metadata: dict[str, Any]) -> tuple[Data, ...]:
        """Return a line as buffers; a large payload of a frame is a buffer of its own."""
        if self.content_type == NDJSON:
            body = {"modality": modality, "data": pybase64.b64encode_as_string(data), "metadata": metadata}
            return (msgspec.json.encode(body) + b"\n",)
        header = msgspec.json.encode({"modality": modality, "metadata": metadata})
        head = struct.pack("<IQ", len(header), len(data)) + header
        return (head, data) if len(data) >= UNCOPIED_BYTES else (b"".join((head, data)),)


LINES: Final = LineFormat(NDJSON, b"\n")
"""One JSON object per line, with data in base64."""

BINARY: Final = LineFormat(FRAMES, b"")
"""Binary frames: u32 header length, u64 payload length (little endian), JSON header, payload."""


def chunk_lines(form: LineFormat, chunks: Sequence[EncodedChunk]) -> Iterator[tuple[Data, ...]]:
    """Yield the lines of some chunks, each as buffers; chunks over the limit of a line are split into parts."""
    for chunk in chunks:
        if len(chunk.data) <= LINE_BYTES:
            yield form.buffers(chunk.modality, chunk.data, chunk.metadata)
            continue
        parts = -(-len(chunk.data) // LINE_BYTES)
        for part in range(parts):
            piece = memoryview(chunk.data)[part * LINE_BYTES : (part + 1) * LINE_BYTES]
            yield form.buffers(chunk.modality, piece, {**chunk.metadata, "part": part, "parts": parts})


def error_line(form: LineFormat, reply: ErrorReply, request_id: str) -> bytes:
    """Return the line that ends a failed stream."""
    return form.line("error", reply.message.encode(), reply.metadata(request_id))


def whole_outputs(chunks: Sequence[EncodedChunk]) -> dict[str, list[dict[str, Any]]]:
    """Return outputs by modality: text and audio joined into one entry each, other outputs one by one."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for chunk in joined_chunks(chunks):
        entry = {"data": pybase64.b64encode_as_string(chunk.data), "metadata": chunk.metadata}
        grouped.setdefault(chunk.modality, []).append(entry)
    return grouped


def joined_chunks(chunks: Sequence[EncodedChunk]) -> list[EncodedChunk]:
    """Return chunks grouped by modality, in order of first appearance; text and audio are joined into one each."""
    grouped: dict[str, list[EncodedChunk]] = {}
    for chunk in chunks:
        grouped.setdefault(chunk.modality, []).append(chunk)
    return [chunk for modality, parts in grouped.items() for chunk in _joined(modality, parts)]


def pieces(lines: Iterable[Data]) -> Iterator[Data]:
    """Join lines into few writes of limited size, so that a client gets data early.

    Large buffers are passed on without a copy.
    """
    waiting: list[Data] = []
    size = 0
    for line in lines:
        if len(line) >= UNCOPIED_BYTES:
            if waiting:
                yield b"".join(waiting)
                waiting, size = [], 0
            yield line
            continue
        waiting.append(line)
        size += len(line)
        if size >= WRITE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def _joined(modality: str, parts: list[EncodedChunk]) -> list[EncodedChunk]:
    if modality not in ("text", "audio") or len(parts) < 2:
        return parts
    metadata = dict(parts[0].metadata)
    if modality == "audio":
        metadata["samples"] = sum(part.metadata["samples"] for part in parts)
    return [EncodedChunk(modality=modality, data=b"".join(part.data for part in parts), metadata=metadata)]
