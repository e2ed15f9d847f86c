"""Events of the server, in the form that clients of OpenAI's Realtime API parse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import pybase64

from mstar_core.api.errors import ErrorReply
from mstar_core.api.realtime.event_log import SentEvents
from mstar_core.api.realtime.history import History
from mstar_core.api.realtime.items import CallEntry, Entry, MessageEntry, SpokenPart, WrittenPart
from mstar_core.api.realtime.response import OpenOutput, RealtimeResponse
from mstar_core.api.realtime.sound.formats import SoundFormat
from mstar_core.api.realtime.wire.item_fields import shown_item

EVENT_ID: Final = "event_"
"""Begin of an event's id; the number of the event in its session follows."""


class ServerEvents:
    """Reports of a conversation as events. Implements `Reports`.

    history: items of the conversation. session: returns the session as clients see it. limits: returns the free and all
    places of requests.
    """

    def __init__(
        self,
        sent: SentEvents,
        conversation_id: str,
        history: History,
        session: Callable[[], Mapping[str, Any]],
        limits: Callable[[], tuple[int, int]],
    ) -> None:
        self._history = history
        self._sent = sent
        self._conversation_id = conversation_id
        self._session = session
        self._limits = limits

    def _send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "event_id": f"{EVENT_ID}{self._sent.count + 1}", **fields}
        self._sent.add(msgspec.json.encode(event))

    # Session

    def session_created(self) -> None:
        """Announce the session."""
        self._send("session.created", session=self._session())

    def settings_changed(self) -> None:
        self._send("session.updated", session=self._session())

    def failed(self, reply: ErrorReply, event_id: str | None) -> None:
        error = {**reply.body["error"], "event_id": event_id}
        self._send("error", error=error)

    # Items

    def item_added(self, entry: Entry, before: str | None) -> None:
        self._send("conversation.item.added", previous_item_id=before, item=shown_item(entry))

    def item_done(self, entry: Entry, before: str | None) -> None:
        self._send("conversation.item.done", previous_item_id=before, item=shown_item(entry))

    def item_retrieved(self, entry: Entry) -> None:
        self._send("conversation.item.retrieved", item=shown_item(entry, has_audio=True))

    def item_deleted(self, item_id: str) -> None:
        self._send("conversation.item.deleted", item_id=item_id)

    def item_truncated(self, item_id: str, part: int, end_ms: int) -> None:
        self._send("conversation.item.truncated", item_id=item_id, content_index=part, audio_end_ms=end_ms)

    # Sound of the user

    def speech_started(self, item_id: str, start_ms: int) -> None:
        self._send("input_audio_buffer.speech_started", item_id=item_id, audio_start_ms=start_ms)

    def speech_stopped(self, item_id: str, end_ms: int) -> None:
        self._send("input_audio_buffer.speech_stopped", item_id=item_id, audio_end_ms=end_ms)

    def idle_ended(self, item_id: str, start_ms: int, end_ms: int) -> None:
        places = {"audio_start_ms": start_ms, "audio_end_ms": end_ms}
        self._send("input_audio_buffer.timeout_triggered", item_id=item_id, **places)

    def sound_committed(self, item_id: str, before: str | None) -> None:
        self._send("input_audio_buffer.committed", item_id=item_id, previous_item_id=before)

    def sound_cleared(self) -> None:
        self._send("input_audio_buffer.cleared")

    def transcript_grew(self, item_id: str, part: int, delta: str) -> None:
        self._transcript("delta", item_id, part, delta=delta)

    def transcript_done(self, item_id: str, part: int, text: str, seconds: float) -> None:
        usage = {"type": "duration", "seconds": round(seconds, 3)}
        self._transcript("completed", item_id, part, transcript=text, usage=usage)

    def transcript_failed(self, item_id: str, part: int, reply: ErrorReply) -> None:
        self._transcript("failed", item_id, part, error=reply.body["error"])

    def _transcript(self, kind: str, item_id: str, part: int, **fields: Any) -> None:
        name = f"conversation.item.input_audio_transcription.{kind}"
        self._send(name, item_id=item_id, content_index=part, **fields)

    # Responses

    def response_created(self, response: RealtimeResponse) -> None:
        self._send("response.created", response=self._response(response))
        free, places = self._limits()
        limit = {"name": "requests", "limit": places, "remaining": free, "reset_seconds": 0.0}
        self._send("rate_limits.updated", rate_limits=[limit])

    def response_done(self, response: RealtimeResponse) -> None:
        self._send("response.done", response=self._response(response))

    def playback_cleared(self, response: RealtimeResponse) -> None:
        self._send("output_audio_buffer.cleared", response_id=response.id)

    def output_added(self, response: RealtimeResponse, output: OpenOutput) -> None:
        entry = output.entry
        place = {"response_id": response.id, "output_index": output.index}
        self._send("response.output_item.added", **place, item=shown_item(entry, is_empty=True))
        if not response.is_apart:
            item = shown_item(entry, is_empty=True)
            self._send("conversation.item.added", previous_item_id=self._before(entry), item=item)
        if isinstance(entry, MessageEntry):
            self._send(
                "response.content_part.added", **_place(response, output), part=_shown_part(entry, is_empty=True)
            )

    def text_grew(self, response: RealtimeResponse, output: OpenOutput, delta: str) -> None:
        name = "output_audio_transcript" if _is_spoken(output) else "output_text"
        self._send(f"response.{name}.delta", **_place(response, output), delta=delta)

    def sound_grew(self, response: RealtimeResponse, output: OpenOutput, data: bytes) -> None:
        self._send("response.output_audio.delta", **_place(response, output), delta=pybase64.b64encode_as_string(data))

    def arguments_grew(self, response: RealtimeResponse, output: OpenOutput, delta: str) -> None:
        self._send("response.function_call_arguments.delta", **_call_place(response, output), delta=delta)

    def output_done(self, response: RealtimeResponse, output: OpenOutput) -> None:
        entry = output.entry
        match entry:
            case CallEntry():
                fields = {"name": entry.name, "arguments": entry.arguments}
                self._send("response.function_call_arguments.done", **_call_place(response, output), **fields)
            case MessageEntry():
                self._message_done(response, output, entry)
        if not response.is_apart:
            self._send("conversation.item.done", previous_item_id=self._before(entry), item=shown_item(entry))
        place = {"response_id": response.id, "output_index": output.index}
        self._send("response.output_item.done", **place, item=shown_item(entry))

    def _message_done(self, response: RealtimeResponse, output: OpenOutput, entry: MessageEntry) -> None:
        place, text = _place(response, output), _text(entry)
        if _is_spoken(output):
            self._send("response.output_audio.done", **place)
            self._send("response.output_audio_transcript.done", **place, transcript=text)
        else:
            self._send("response.output_text.done", **place, text=text)
        self._send("response.content_part.done", **place, part=_shown_part(entry))

    def _before(self, entry: Entry) -> str | None:
        return self._history.before(entry.id) if self._history.holds(entry.id) else None

    def _response(self, response: RealtimeResponse) -> dict[str, Any]:
        settings = response.settings
        return {
            "object": "realtime.response",
            "id": response.id,
            "conversation_id": None if response.is_apart else self._conversation_id,
            "status": response.state,
            "status_details": _details(response),
            "output": [shown_item(output.entry) for output in response.outputs],
            "output_modalities": [settings.output],
            "audio": {"output": {"format": shown_format(settings.spoken), "voice": settings.voice}},
            "max_output_tokens": "inf" if settings.limit is None else settings.limit,
            "metadata": response.metadata,
            "usage": shown_usage(response.usage) if response.usage else None,
        }


def _is_spoken(output: OpenOutput) -> bool:
    return isinstance(output.entry, MessageEntry) and isinstance(output.entry.parts[0], SpokenPart)


def _text(entry: MessageEntry) -> str:
    part = entry.parts[0]
    assert isinstance(part, SpokenPart | WrittenPart)
    return part.spoken.text if isinstance(part, SpokenPart) else part.text


def _shown_part(entry: MessageEntry, *, is_empty: bool = False) -> dict[str, Any]:
    text = "" if is_empty else _text(entry)
    is_spoken = isinstance(entry.parts[0], SpokenPart)
    return {"type": "audio", "transcript": text} if is_spoken else {"type": "text", "text": text}


def _place(response: RealtimeResponse, output: OpenOutput) -> dict[str, Any]:
    return {
        "response_id": response.id,
        "item_id": output.entry.id,
        "output_index": output.index,
        "content_index": 0,
    }


def _call_place(response: RealtimeResponse, output: OpenOutput) -> dict[str, Any]:
    assert isinstance(output.entry, CallEntry)
    place = {"response_id": response.id, "item_id": output.entry.id, "output_index": output.index}
    return {**place, "call_id": output.entry.call_id}


def _details(response: RealtimeResponse) -> dict[str, Any] | None:
    match response.state:
        case "in_progress":
            return None
        case "failed":
            error = response.error.body["error"] if response.error is not None else {}
            return {"type": "failed", "error": {name: error.get(name) for name in ("type", "code", "message")}}
        case "completed":
            return {"type": "completed"}
        case state:
            return {"type": state, "reason": response.reason}


def shown_format(form: SoundFormat) -> dict[str, Any]:
    """Return a format of sound."""
    match form.law:
        case "mu":
            return {"type": "audio/pcmu"}
        case "a":
            return {"type": "audio/pcma"}
        case _:
            return {"type": "audio/pcm", "rate": form.rate}


def shown_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return token counts in the terms of realtime clients. A response that was stopped has no details."""
    shown: dict[str, Any] = {
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
    }
    read, made = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    if read is not None:
        names = ("cached_tokens", "text_tokens", "audio_tokens", "image_tokens")
        shown["input_token_details"] = {name: read.get(name, 0) for name in names}
    if made is not None:
        shown["output_token_details"] = {name: made.get(name, 0) for name in ("text_tokens", "audio_tokens")}
    return shown
