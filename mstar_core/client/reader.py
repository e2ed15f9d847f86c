"""Readers of a streamed response: lines or frames into events. They own no socket; each stream owns one.

A line is one JSON object with a base64 payload. A frame is a length, a JSON header and the payload as it is.
"""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.client.events import ErrorEvent, Event, chunk_of
from mstar_core.errors import TransportError

FRAMES: Final = "application/x-mstar-frames"
LENGTHS: Final = struct.Struct("<IQ")
"""Bytes of a frame's header and of its payload, little endian."""

PAYLOAD_LIMIT_BYTES: Final = 17 * 1024 * 1024
"""The server keeps a line or payload under 16 MiB; a longer one is malformed."""

HEADER_LIMIT_BYTES: Final = 1 << 20
BROKEN_OFF: Final = "broken_off"
MALFORMED: Final = "malformed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line or frame. modality: an output modality, or `start`, `done`, `error`. data: the decoded payload."""

    modality: str
    data: bytes = b""
    metadata: dict[str, Any] = field(default_factory=dict)


class LineReader:
    """Splits a body that arrives in pieces into lines. Owned by the reader of one response."""

    kind: Final = "line"

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._size = 0

    def push(self, data: bytes) -> list[Line]:
        """Return the lines that `data` completes. Raises TransportError for a malformed line.

        Lines end at LF alone, because JSON text may contain every other separator. Blank lines are heartbeats.
        """
        *ends, rest = data.split(b"\n")
        lines = []
        for end in ends:
            text = b"".join((*self._pending, end)).strip()
            self._pending, self._size = [], 0
            if text:
                lines.append(_parse_line(text))
        self._size += len(rest)
        if self._size > PAYLOAD_LIMIT_BYTES:
            raise TransportError("the stream cannot be read", f"a line is longer than {PAYLOAD_LIMIT_BYTES} bytes")
        if rest:
            self._pending.append(rest)
        return lines

    @property
    def is_between(self) -> bool:
        """Whether the body so far ends at the end of a line."""
        return not b"".join(self._pending).strip()


class FrameReader:
    """Splits a body that arrives in pieces into frames. Owned by the reader of one response."""

    kind: Final = "frame"

    def __init__(self) -> None:
        self._pending = bytearray()

    def push(self, data: bytes) -> list[Line]:
        """Return the frames that `data` completes, as lines. Raises TransportError for a malformed frame."""
        self._pending += data
        lines = []
        at = 0
        while len(self._pending) - at >= LENGTHS.size:
            header, payload = LENGTHS.unpack_from(self._pending, at)
            if header > HEADER_LIMIT_BYTES or payload > PAYLOAD_LIMIT_BYTES:
                raise TransportError(
                    "the stream cannot be read", f"a frame of {header} and {payload} bytes is too long"
                )
            begin = at + LENGTHS.size + header
            if len(self._pending) < begin + payload:
                break
            lines.append(_parse_frame(self._pending[begin - header : begin], self._pending[begin : begin + payload]))
            at = begin + payload
        del self._pending[:at]
        return lines

    @property
    def is_between(self) -> bool:
        """Whether the body so far ends at the end of a frame."""
        return not self._pending


class StreamReader:
    """Reads one response. Its attributes hold the facts of the `start` and `done` lines.

    progress: steps done and all steps, by the last `progress` line. count: lines or frames so far. is_over: nothing
    more follows, because the response ended well, failed or broke off.
    """

    def __init__(self, request_id: str | None = None, content_type: str = "") -> None:
        """content_type: of the response; frames if it says so, else lines."""
        self.request_id = request_id
        self.seed: int | None = None
        self.model: str | None = None
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.warnings: list[str] = []
        self.progress: tuple[int, int] | None = None
        self.count = 0
        self.is_over = False
        self._lines: LineReader | FrameReader
        self._parts: list[Line] = []
        self.resume(content_type)

    def resume(self, content_type: str) -> None:
        """Go on with another response, which begins behind the last whole line or frame of this one."""
        self._lines = FrameReader() if content_type.startswith(FRAMES) else LineReader()

    def push(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes; none once the response is over."""
        if self.is_over:
            return []
        try:
            lines = self._lines.push(data)
        except TransportError as error:
            return [self._fail(MALFORMED, str(error))]
        self.count += len(lines)
        return [event for line in lines for event in self._events(line)]

    def end(self, why: str = "") -> list[Event]:
        """Note the end of the body and its cause. A body without a `done` line gives an error event."""
        if self.is_over:
            return []
        kind = self._lines.kind
        place = f"between two {kind}s" if self._lines.is_between else f"in the middle of a {kind}"
        return [self._fail(BROKEN_OFF, f"the response broke off before its end, {place}{f': {why}' if why else ''}")]

    def _events(self, line: Line) -> list[Event]:
        if self.is_over:
            return []
        facts = line.metadata
        match line.modality:
            case "start":
                self.request_id = facts.get("request_id") or self.request_id
                self.seed, self.model = facts.get("seed"), facts.get("model")
            case "done":
                self.is_over = True
                self.finish_reason, self.usage = facts.get("finish_reason"), facts.get("usage")
                self.warnings = list(facts.get("warnings") or [])
            case "progress":
                self.progress = (int(facts.get("step") or 0), int(facts.get("steps") or 0))
            case "error":
                self.is_over = True
                return [error_event(line)]
            case _:
                whole = self._joined(line)
                return [] if whole is None else [chunk_of(whole.modality, whole.data, whole.metadata)]
        return []

    def _joined(self, line: Line) -> Line | None:
        """Return an output whole. An output too long for one line is returned with its last part, before that None."""
        parts = line.metadata.get("parts")
        if parts is None:
            return line
        self._parts.append(line)
        if len(self._parts) < parts:
            return None
        data = b"".join(part.data for part in self._parts)
        self._parts = []
        metadata = {name: value for name, value in line.metadata.items() if name not in ("part", "parts")}
        return Line(modality=line.modality, data=data, metadata=metadata)

    def _fail(self, code: str, message: str) -> ErrorEvent:
        self.is_over = True
        return ErrorEvent(code=code, status=500, message=message, request_id=self.request_id)


def error_event(line: Line) -> ErrorEvent:
    """Return the event of an error line."""
    facts = line.metadata
    status = facts.get("status")
    return ErrorEvent(
        code=str(facts.get("code") or "internal_error"),
        status=status if isinstance(status, int) else 500,
        message=line.data.decode("utf-8", "replace"),
        request_id=facts.get("request_id"),
        param=facts.get("param"),
    )


def _parse_line(text: bytes) -> Line:
    try:
        fields = json.loads(text)
        data = base64.b64decode(fields.get("data") or "", validate=True)
        return Line(modality=str(fields["modality"]), data=data, metadata=dict(fields.get("metadata") or {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransportError("the stream cannot be read", f"malformed line: {text[:80]!r}") from error


def _parse_frame(header: bytearray, payload: bytearray) -> Line:
    try:
        fields = json.loads(header)
        return Line(modality=str(fields["modality"]), data=bytes(payload), metadata=dict(fields.get("metadata") or {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransportError("the stream cannot be read", f"malformed frame: {bytes(header[:80])!r}") from error
