"""The forms of /generate's answer: NDJSON lines, binary frames, one JSON object. Used by that route alone."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import msgspec

from mstar_core.api.errors import ErrorReply
from mstar_core.api.output.encode import OutputChunk

NDJSON: Final = "application/x-ndjson; charset=utf-8"
FRAMES: Final = "application/x-mstar-frames"
LINE_BYTES: Final = 12 << 20
"""Payload of one line; with base64 a line stays under 16 MiB, which clients accept."""

WRITE_BYTES: Final = 1 << 20

APART_BYTES: Final = 256 << 10
"""A payload of this size is written from where it lies, which costs a call of the socket more and a copy less."""

Data = bytes | memoryview


class LineFormat(Protocol):
    """Writes the lines of a streamed answer."""

    content_type: str
    keepalive: bytes

    def line(self, modality: str, data: Data, metadata: dict[str, Any]) -> bytes: ...

    def buffers(self, modality: str, data: Data, metadata: dict[str, Any]) -> Iterable[Data]:
        """A line in pieces, of which a large payload may be one as it lies in memory."""
        ...


class Ndjson:
    """One JSON object a line, data in base64."""

    content_type = NDJSON
    keepalive = b"\n"

    def line(self, modality: str, data: Data, metadata: dict[str, Any]) -> bytes:
        body = {"modality": modality, "data": base64.b64encode(data).decode(), "metadata": metadata}
        return msgspec.json.encode(body) + b"\n"

    def buffers(self, modality: str, data: Data, metadata: dict[str, Any]) -> Iterable[Data]:
        return (self.line(modality, data, metadata),)


class Frames:
    """u32 header length, u64 payload length (little endian), JSON header, payload."""

    content_type = FRAMES
    keepalive = b""

    def line(self, modality: str, data: Data, metadata: dict[str, Any]) -> bytes:
        return b"".join((self._head(modality, data, metadata), data))

    def buffers(self, modality: str, data: Data, metadata: dict[str, Any]) -> Iterable[Data]:
        if len(data) < APART_BYTES:
            return (self.line(modality, data, metadata),)
        return self._head(modality, data, metadata), data

    def _head(self, modality: str, data: Data, metadata: dict[str, Any]) -> bytes:
        header = msgspec.json.encode({"modality": modality, "metadata": metadata})
        return struct.pack("<IQ", len(header), len(data)) + header


def chunk_lines(form: LineFormat, chunks: Sequence[OutputChunk]) -> Iterator[Data]:
    """The lines of some chunks, in pieces; a chunk too long for one line is cut into parts."""
    for chunk in chunks:
        if len(chunk.data) <= LINE_BYTES:
            yield from form.buffers(chunk.modality, chunk.data, chunk.metadata)
            continue
        parts = -(-len(chunk.data) // LINE_BYTES)
        for part in range(parts):
            piece = memoryview(chunk.data)[part * LINE_BYTES : (part + 1) * LINE_BYTES]
            yield from form.buffers(chunk.modality, piece, {**chunk.metadata, "part": part, "parts": parts})


def error_line(form: LineFormat, reply: ErrorReply, request_id: str) -> bytes:
    """The one line that ends a stream which failed."""
    return form.line("error", reply.message.encode(), reply.metadata(request_id))


def whole_outputs(chunks: Sequence[OutputChunk]) -> dict[str, list[dict[str, Any]]]:
    """Outputs by modality: text and audio joined into one entry, all others one by one in order."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for chunk in joined_chunks(chunks):
        grouped.setdefault(chunk.modality, []).append(_entry(chunk))
    return grouped


def joined_chunks(chunks: Sequence[OutputChunk]) -> list[OutputChunk]:
    """Chunks grouped by modality, in the order in which these first came; text and audio joined into one each."""
    grouped: dict[str, list[OutputChunk]] = {}
    for chunk in chunks:
        grouped.setdefault(chunk.modality, []).append(chunk)
    return [chunk for modality, parts in grouped.items() for chunk in _joined(modality, parts)]


def pieces(lines: Iterable[Data]) -> Iterator[Data]:
    """Lines put together for few writes, but none so large that a client has to take it all before the next.

    What is large by itself is handed on as it is.
    """
    waiting: list[Data] = []
    size = 0
    for line in lines:
        if len(line) >= APART_BYTES:
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


def _joined(modality: str, parts: list[OutputChunk]) -> list[OutputChunk]:
    if modality not in ("text", "audio") or len(parts) < 2:
        return parts
    metadata = dict(parts[0].metadata)
    if modality == "audio":
        metadata["samples"] = sum(part.metadata["samples"] for part in parts)
    return [OutputChunk(modality=modality, data=b"".join(part.data for part in parts), metadata=metadata)]


def _entry(chunk: OutputChunk) -> dict[str, Any]:
    return {"data": base64.b64encode(chunk.data).decode(), "metadata": chunk.metadata}
