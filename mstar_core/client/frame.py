"""Frames of the native stream: a length, a JSON header, the payload as it is. Read from bytes as they arrive."""

from __future__ import annotations

import json
import struct
from typing import Final

from mstar_core.client.line import LINE_LIMIT_BYTES, Line
from mstar_core.errors import TransportError

FRAMES: Final = "application/x-mstar-frames"
LENGTHS: Final = struct.Struct("<IQ")
"""Bytes of the header and of the payload, little endian."""

HEADER_LIMIT_BYTES: Final = 1 << 20


class FrameReader:
    """Finds frames in a body that comes in pieces. Owned by the reader of one answer."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def push(self, data: bytes) -> list[Line]:
        """The frames that `data` completes, as lines. Raises TransportError for what is no frame."""
        self._waiting += data
        lines = []
        at = 0
        while len(self._waiting) - at >= LENGTHS.size:
            header, payload = LENGTHS.unpack_from(self._waiting, at)
            if header > HEADER_LIMIT_BYTES or payload > LINE_LIMIT_BYTES:
                raise TransportError(
                    "the stream cannot be read", f"a frame of {header} and {payload} bytes is too long"
                )
            begin = at + LENGTHS.size + header
            if len(self._waiting) < begin + payload:
                break
            lines.append(_line(self._waiting[begin - header : begin], self._waiting[begin : begin + payload]))
            at = begin + payload
        del self._waiting[:at]
        return lines

    @property
    def is_between(self) -> bool:
        """Whether the body so far ends at the end of a frame."""
        return not self._waiting


def _line(header: bytearray, payload: bytearray) -> Line:
    try:
        found = json.loads(header)
        return Line(modality=str(found["modality"]), data=bytes(payload), metadata=dict(found.get("metadata") or {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransportError("the stream cannot be read", f"not a frame of ours: {bytes(header[:80])!r}") from error
