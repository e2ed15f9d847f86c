"""Chat answers in the format of OpenAI: whole, and as events. Used by the chat route."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from mstar_core.api.exchange import DONE, event
from mstar_core.api.group import Group, GroupPart
from mstar_core.api.output.encode import EncodedChunk, OutputEncoder
from mstar_core.api.output.kept_events import Event
from mstar_core.api.schema import (
    AnswerAudio,
    AnswerMessage,
    AnswerPart,
    ChatChunk,
    ChatCompletion,
    Choice,
    ChunkChoice,
    Delta,
    MediaUrl,
    Usage,
)
from mstar_core.sound_files import AudioFormat, encode_whole

Reason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFrame:
    """Fields common to all objects of an answer. created: seconds since the epoch. model: name of the deployment."""

    request_id: str
    created: int
    model: str
    seed: int

    @property
    def id(self) -> str:
        return f"chatcmpl-{self.request_id}"

    @property
    def fingerprint(self) -> str:
        return f"seed-{self.seed}"

    def audio_id(self, index: int) -> str:
        """Return the id of the audio of a choice."""
        return f"audio-{self.request_id}-{index}"


@dataclass(slots=True)
class ChatAnswer:
    """Collected chunks of one choice."""

    parts: list[EncodedChunk] = field(default_factory=list)

    def text(self) -> str:
        return "".join(chunk.data.decode() for chunk in self.parts if chunk.modality == "text")

    def sound(self) -> bytes:
        """Return the audio as PCM16."""
        return b"".join(chunk.data for chunk in self.parts if chunk.modality == "audio")

    def content(self) -> str | list[AnswerPart]:
        """Return the text, or a list of parts if there are images. Consecutive text chunks form one part."""
        if not any(chunk.modality == "image" for chunk in self.parts):
            return self.text()
        parts: list[AnswerPart] = []
        for chunk in self.parts:
            if chunk.modality == "image":
                parts.append(AnswerPart(type="image_url", image_url=MediaUrl(url=image_url(chunk.data))))
            elif chunk.modality == "text" and parts and parts[-1].type == "text":
                parts[-1] = AnswerPart(type="text", text=f"{parts[-1].text}{chunk.data.decode()}")
            elif chunk.modality == "text":
                parts.append(AnswerPart(type="text", text=chunk.data.decode()))
        return parts


async def whole_chat(
    frame: ChatFrame, group: Group, answers: Sequence[ChatAnswer], form: AudioFormat
) -> ChatCompletion:
    """Return the whole answer of a finished group."""
    choices = []
    for index, answer in enumerate(answers):
        message = AnswerMessage(content=answer.content())
        if "audio" in group.calls[index].outputs:
            message.audio = await _whole_sound(frame, index, answer, form, group.sessions[index].encoder)
        choices.append(Choice(index=index, message=message, finish_reason=reason_of(group, index)))
    return ChatCompletion(
        id=frame.id,
        created=frame.created,
        model=frame.model,
        choices=choices,
        usage=usage_of(group),
        system_fingerprint=frame.fingerprint,
    )


class ChatEvents:
    """Events of a streamed answer. is_counted: every event has a usage field, which is null except in the last one."""

    def __init__(self, frame: ChatFrame, *, is_counted: bool) -> None:
        self._frame = frame
        self._is_counted = is_counted
        self._begun: set[int] = set()
        self._spoken: dict[int, list[str]] = {}

    def of(self, piece: GroupPart, outputs: Sequence[str], group: Group) -> list[Event]:
        """Return the events of one part; the first event of a choice has its role."""
        events: list[Event] = []
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            events.append(self._chunk(piece.index, Delta(role="assistant", content="")))
        for chunk in piece.chunks:
            delta = self._delta(piece.index, chunk)
            if delta is not None:
                events.append(self._chunk(piece.index, delta))
        if piece.done is not None:
            if "audio" in outputs:
                audio = AnswerAudio(
                    id=self._frame.audio_id(piece.index),
                    transcript="".join(self._spoken.get(piece.index, ())),
                    expires_at=self._frame.created,
                )
                events.append(self._chunk(piece.index, Delta(audio=audio)))
            events.append(self._chunk(piece.index, Delta(), reason_of(group, piece.index)))
        return events

    def end(self, group: Group) -> list[Event]:
        """Return the final events of a successful stream."""
        return [*((event(self._body([], usage_of(group))),) if self._is_counted else ()), DONE]

    def _delta(self, index: int, chunk: EncodedChunk) -> Delta | None:
        match chunk.modality:
            case "text":
                text = chunk.data.decode()
                self._spoken.setdefault(index, []).append(text)
                return Delta(content=text)
            case "audio":
                data = base64.b64encode(chunk.data).decode()
                return Delta(audio=AnswerAudio(id=self._frame.audio_id(index), data=data))
            case "image":
                return Delta(content=image_url(chunk.data))
            case _:
                return None

    def _chunk(self, index: int, delta: Delta, reason: Reason | None = None) -> Event:
        return event(self._body([ChunkChoice(index=index, delta=delta, finish_reason=reason)], None))

    def _body(self, choices: list[ChunkChoice], usage: Usage | None) -> ChatChunk:
        frame = self._frame
        body = ChatChunk(
            id=frame.id, created=frame.created, model=frame.model, choices=choices, system_fingerprint=frame.fingerprint
        )
        if self._is_counted:
            body.usage = usage
        return body


def image_url(data: bytes) -> str:
    """Return a PNG as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def reason_of(group: Group, index: int) -> Reason:
    """Return the finish reason of an item in the terms of OpenAI."""
    return "length" if group.done[index].finish_reason == "length" else "stop"


def usage_of(group: Group) -> Usage:
    """Return the total usage of all items."""
    return msgspec.convert(group.usage, Usage)


async def _whole_sound(
    frame: ChatFrame, index: int, answer: ChatAnswer, form: AudioFormat, encoder: OutputEncoder
) -> AnswerAudio:
    file = await asyncio.to_thread(encode_whole, form, answer.sound(), encoder.rate, encoder.channels)
    return AnswerAudio(
        id=frame.audio_id(index),
        data=base64.b64encode(file).decode(),
        expires_at=frame.created,
        transcript=answer.text(),
    )
