"""Lines of the native stream: one JSON object each, base64 payload. Read from bytes as they arrive."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.errors import TransportError

LINE_LIMIT_BYTES: Final = 17 * 1024 * 1024
"""The api keeps a line under 16 MiB; a longer one is no line of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line. modality: an output modality, or `start`, `done`, `error`. data: the payload, decoded."""

    modality: str
    data: bytes = b""
    metadata: dict[str, Any] = field(default_factory=dict)


def read_lines(chunks: Iterable[bytes]) -> Iterator[Line]:
    """Lines of a body. Split at LF alone, because JSON text may hold every other separator; blank lines keep alive.

    Raises TransportError for a line that is none, and for a body that breaks off in the middle of one.
    """
    waiting: list[bytes] = []
    size = 0
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            text = b"".join((*waiting, end)).strip()
            waiting, size = [], 0
            if text:
                yield parse_line(text)
        size += len(rest)
        if size > LINE_LIMIT_BYTES:
            raise TransportError("the stream cannot be read", f"a line is longer than {LINE_LIMIT_BYTES} bytes")
        if rest:
            waiting.append(rest)
    if b"".join(waiting).strip():
        raise TransportError("the stream broke off in the middle of a line", hint="send the request again")


def parse_line(text: bytes) -> Line:
    """One line. Raises TransportError."""
    try:
        found = json.loads(text)
        metadata = found.get("metadata") or {}
        return Line(
            modality=str(found["modality"]),
            data=base64.b64decode(found.get("data") or "", validate=True),
            metadata=metadata,
        )
    except (ValueError, KeyError, AttributeError) as error:
        raise TransportError("the stream cannot be read", f"not a line of ours: {text[:80]!r}") from error
