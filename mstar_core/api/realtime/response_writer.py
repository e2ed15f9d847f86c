"""Writer of a response: appends what the model generates, and reports each change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mstar_core.api.errors import ErrorReply
from mstar_core.api.realtime.history import new_id
from mstar_core.api.realtime.items import CallEntry, Entry, MessageEntry, SpokenPart, Status, WrittenPart
from mstar_core.api.realtime.reports import Reports
from mstar_core.api.realtime.response import OpenOutput, RealtimeResponse, ResponseState, StopReason
from mstar_core.api.realtime.sound.spoken import SpokenText


class ResponseWriter:
    """Appends to a response and reports each change. One output is open at a time."""

    def __init__(
        self, response: RealtimeResponse, reports: Reports, rate: int, join: Callable[[Entry], object]
    ) -> None:
        """rate: of the model's sound, in samples per second. join: adds an item to the conversation."""
        self.response = response
        self._join = join
        self._reports = reports
        self._rate = rate
        self._open: OpenOutput | None = None

    def text(self, delta: str) -> None:
        """Append text to the message of the answer, written or spoken."""
        if not delta:
            return
        output = self._message()
        part = _last_part(output)
        if isinstance(part, SpokenPart):
            part.spoken.say(delta)
        else:
            part.text += delta
        self._reports.text_grew(self.response, output, delta)

    def sound(self, count: int, data: bytes) -> None:
        """Append sound. count: samples of the model. data: encoded for the client."""
        output = self._message()
        part = _last_part(output)
        assert isinstance(part, SpokenPart)
        part.spoken.sound(count)
        if data:
            self._reports.sound_grew(self.response, output, data)

    def late_sound(self, data: bytes) -> None:
        """Send encoded sound whose samples are counted already."""
        if data and self._open is not None:
            self._reports.sound_grew(self.response, self._open, data)

    def begin_call(self, name: str, call_id: str) -> None:
        """Begin a call of a function."""
        self._add(CallEntry(id=new_id("item"), call_id=call_id, name=name, status="in_progress"))

    def arguments(self, delta: str) -> None:
        """Append to the arguments of the call that has begun."""
        output = self._open
        assert output is not None and isinstance(output.entry, CallEntry)
        output.entry.arguments += delta
        self._reports.arguments_grew(self.response, output, delta)

    def close(self, status: Status = "completed") -> None:
        """End the open output."""
        output, self._open = self._open, None
        if output is not None:
            output.entry.status = status
            self._reports.output_done(self.response, output)

    def end(
        self,
        state: ResponseState,
        *,
        reason: StopReason | None = None,
        error: ErrorReply | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> None:
        """End the response, once."""
        response = self.response
        if response.is_over:
            return
        if state == "completed" and response.speech is not None:
            response.speech.end()
        self.close("completed" if state == "completed" else "incomplete")
        response.state, response.reason, response.error = state, reason, error
        response.usage = usage or {}
        self._reports.response_done(response)

    def _message(self) -> OpenOutput:
        if self._open is not None and isinstance(self._open.entry, MessageEntry):
            return self._open
        part = SpokenPart(SpokenText(self._rate)) if self.response.settings.output == "audio" else WrittenPart("")
        return self._add(MessageEntry(id=new_id("item"), role="assistant", parts=[part], status="in_progress"))

    def _add(self, entry: MessageEntry | CallEntry) -> OpenOutput:
        self.close()
        self._open = output = OpenOutput(len(self.response.outputs), entry)
        self.response.outputs.append(output)
        if not self.response.is_apart:
            self._join(entry)
        self._reports.output_added(self.response, output)
        return output


def _last_part(output: OpenOutput) -> SpokenPart | WrittenPart:
    assert isinstance(output.entry, MessageEntry)
    part = output.entry.parts[-1]
    assert isinstance(part, SpokenPart | WrittenPart)
    return part
