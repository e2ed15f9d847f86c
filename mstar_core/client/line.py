"""Lines of the native stream: one JSON object each, base64 payload. Read from bytes as they arrive."""

from __future__ import annotations

import base64
import json
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


class LineReader:
    """Finds lines in a body that comes in pieces. Owned by the reader of one answer."""

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        self._size = 0

    def push(self, data: bytes) -> list[Line]:
        """The lines that `data` completes.

        Split at LF alone, because JSON text may hold every other separator; blank lines only keep the connection
        alive. Raises TransportError for what is no line.
        """
        *ends, rest = data.split(b"\n")
        lines = []
        for end in ends:
            text = b"".join((*self._waiting, end)).strip()
            self._waiting, self._size = [], 0
            if text:
                lines.append(parse_line(text))
        self._size += len(rest)
        if self._size > LINE_LIMIT_BYTES:
            raise TransportError("the stream cannot be read", f"a line is longer than {LINE_LIMIT_BYTES} bytes")
        if rest:
            self._waiting.append(rest)
        return lines

    @property
    def is_between(self) -> bool:
        """Whether the body so far ends at the end of a line."""
        return not b"".join(self._waiting).strip()


def parse_line(text: bytes) -> Line:
    """One line. Raises TransportError."""
    try:
        found = json.loads(text)
        return Line(
            modality=str(found["modality"]),
            data=base64.b64decode(found.get("data") or "", validate=True),
            metadata=dict(found.get("metadata") or {}),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransportError("the stream cannot be read", f"not a line of ours: {text[:80]!r}") from error
