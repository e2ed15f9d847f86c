"""StreamReader: from the bytes of a streamed answer to its events. Knows no sockets; both kinds of stream own one."""

from __future__ import annotations

from typing import Any, Final

from mstar_core.client.event import ErrorEvent, Event, chunk_of, error_of
from mstar_core.client.frame import FRAMES, FrameReader
from mstar_core.client.line import Line, LineReader
from mstar_core.errors import TransportError

BROKEN_OFF: Final = "broken_off"
MALFORMED: Final = "malformed"


class StreamReader:
    """Reads one answer. Its attributes tell what the `start` and the `done` line said.

    is_over: nothing more will come, because the answer ended well, failed or broke off.
    """

    def __init__(self, request_id: str | None = None, content_type: str = "") -> None:
        """content_type: of the answer; lines unless it says frames."""
        self.request_id = request_id
        self.seed: int | None = None
        self.model: str | None = None
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.warnings: list[str] = []
        self.is_over = False
        self._lines: LineReader | FrameReader = FrameReader() if content_type.startswith(FRAMES) else LineReader()
        self._parts: list[Line] = []

    def push(self, data: bytes) -> list[Event]:
        """The events that `data` completes; nothing once the answer is over."""
        if self.is_over:
            return []
        try:
            lines = self._lines.push(data)
        except TransportError as error:
            return [self._fail(MALFORMED, str(error))]
        return [event for line in lines for event in self._one(line)]

    def end(self, why: str = "") -> list[Event]:
        """The body has ended, because of `why`. Without a `done` line that is a failure."""
        if self.is_over:
            return []
        kind = "frame" if isinstance(self._lines, FrameReader) else "line"
        place = f"between two {kind}s" if self._lines.is_between else f"in the middle of a {kind}"
        reason = f": {why}" if why else ""
        return [self._fail(BROKEN_OFF, f"the answer broke off before its end, {place}{reason}")]

    def _one(self, line: Line) -> list[Event]:
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
            case "error":
                self.is_over = True
                return [error_of(line)]
            case _:
                whole = self._joined(line)
                return [] if whole is None else [chunk_of(whole)]
        return []

    def _joined(self, line: Line) -> Line | None:
        """The whole of an output that was too long for one line, with its last part; None before that."""
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
