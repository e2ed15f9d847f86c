"""Chat answers in the format of OpenAI: whole, and as events. Used by the chat route."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pybase64

from mstar_core.api.exchange import DONE, event
from mstar_core.api.group import Group, GroupPart
from mstar_core.api.output.encode import EncodedChunk, OutputEncoder
from mstar_core.api.output.kept_events import Event
from mstar_core.api.output.token_scores import TokenScore
from mstar_core.api.parse.capabilities import LOGPROBS
from mstar_core.api.schema import (
    AnswerAudio,
    AnswerMessage,
    AnswerPart,
    CalledFunction,
    ChatChunk,
    ChatCompletion,
    ChatToolCall,
    Choice,
    ChunkChoice,
    Delta,
    FinishReason,
    FunctionDelta,
    MediaUrl,
    ToolCallDelta,
    Usage,
)
from mstar_core.api.text.answers import AnswerReader
from mstar_core.api.text.logprobs import chat_logprobs_of
from mstar_core.plugin.chat.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning
from mstar_core.sound_files import AudioFormat, encode_whole


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


class ChatAnswer:
    """Collected parts of one choice."""

    def __init__(self, reader: AnswerReader) -> None:
        self.reasoning = ""
        self.calls: list[ChatToolCall] = []
        self.reader = reader
        self.scores: list[TokenScore] = []
        self._parts: list[str | EncodedChunk] = []

    def add(self, piece: GroupPart) -> None:
        """Take a part of the group."""
        for read in self.reader.read(piece):
            if read.chunk is not None:
                self.scores += read.chunk.scores
                if read.chunk.modality != "text":
                    self._parts.append(read.chunk)
            for part in read.parts:
                self._add(part)

    def _add(self, part: Part) -> None:
        match part:
            case Content():
                self._parts.append(part.text)
            case Reasoning():
                self.reasoning += part.text
            case CallBegin():
                call = CalledFunction(name=part.name)
                self.calls.append(ChatToolCall(id=self.reader.call_id(part.index), function=call))
            case CallArguments():
                self.calls[part.index].function.arguments += part.text

    def text(self) -> str:
        return "".join(part for part in self._parts if isinstance(part, str))

    def sound(self) -> bytes:
        """Return the audio as PCM16."""
        return b"".join(
            part.data for part in self._parts if isinstance(part, EncodedChunk) and part.modality == "audio"
        )

    def content(self) -> str | list[AnswerPart] | None:
        """Return the text, or a list of parts if there are images. Consecutive text forms one part."""
        images = [part for part in self._parts if isinstance(part, EncodedChunk) and part.modality == "image"]
        if not images:
            return self.text() or (None if self.calls else "")
        parts: list[AnswerPart] = []
        for part in self._parts:
            if isinstance(part, EncodedChunk):
                if part.modality == "image":
                    parts.append(AnswerPart(type="image_url", image_url=MediaUrl(url=image_url(part.data))))
            elif parts and parts[-1].type == "text":
                parts[-1] = AnswerPart(type="text", text=f"{parts[-1].text}{part}")
            else:
                parts.append(AnswerPart(type="text", text=part))
        return parts

    def message(self) -> AnswerMessage:
        """Return the answer without its audio."""
        message = AnswerMessage(content=self.content())
        if self.reasoning:
            message.reasoning_content = self.reasoning
        if self.calls:
            message.tool_calls = self.calls
        return message


async def whole_chat(
    frame: ChatFrame, group: Group, answers: Sequence[ChatAnswer], form: AudioFormat
) -> ChatCompletion:
    """Return the whole answer of a finished group."""
    choices = []
    for index, answer in enumerate(answers):
        message = answer.message()
        if "audio" in group.calls[index].outputs:
            message.audio = await _whole_sound(frame, index, answer, form, group.sessions[index].encoder)
        choice = Choice(index=index, message=message, finish_reason=reason_of(group, answer.reader, index))
        if has_logprobs(group, index):
            choice.logprobs = chat_logprobs_of(answer.scores)
        choices.append(choice)
    return ChatCompletion(
        id=frame.id,
        created=frame.created,
        model=frame.model,
        choices=choices,
        usage=usage_of(group, [answer.reader for answer in answers]),
        system_fingerprint=frame.fingerprint,
    )


class ChatEvents:
    """Events of a streamed answer. is_counted: every event has a usage field, which is null except in the last one."""

    def __init__(self, frame: ChatFrame, readers: Sequence[AnswerReader], *, is_counted: bool) -> None:
        self._frame = frame
        self._readers = readers
        self._is_counted = is_counted
        self._begun: set[int] = set()
        self._spoken: dict[int, list[str]] = {}
        self._scores: dict[int, list[TokenScore]] = {}  # of tokens whose text has not been sent

    def of(self, piece: GroupPart, outputs: Sequence[str], group: Group) -> list[Event]:
        """Return the events of one part; the first event of a choice has its role."""
        events: list[Event] = []
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            events.append(self._chunk(piece.index, Delta(role="assistant", content="")))
        reader = self._readers[piece.index]
        for read in reader.read(piece):
            self._spoken.setdefault(piece.index, []).extend(p.text for p in read.parts if isinstance(p, Content))
            if read.chunk is not None:
                self._scores.setdefault(piece.index, []).extend(read.chunk.scores)
            deltas = [part_delta(part, reader) for part in read.parts]
            if read.chunk is not None:
                deltas.append(self._delta(piece.index, read.chunk))
            events += [self._chunk(piece.index, delta) for delta in deltas if delta is not None]
        if piece.done is not None:
            if "audio" in outputs:
                audio = AnswerAudio(
                    id=self._frame.audio_id(piece.index),
                    transcript="".join(self._spoken.get(piece.index, ())),
                    expires_at=self._frame.created,
                )
                events.append(self._chunk(piece.index, Delta(audio=audio)))
            events.append(self._chunk(piece.index, Delta(), reason_of(group, reader, piece.index)))
        return events

    def end(self, group: Group) -> list[Event]:
        """Return the final events of a successful stream."""
        return [*((event(self._body([], usage_of(group, self._readers))),) if self._is_counted else ()), DONE]

    def _delta(self, index: int, chunk: EncodedChunk) -> Delta | None:
        match chunk.modality:
            case "audio":
                data = pybase64.b64encode_as_string(chunk.data)
                return Delta(audio=AnswerAudio(id=self._frame.audio_id(index), data=data))
            case "image":
                return Delta(content=image_url(chunk.data))
            case _:
                return None

    def _chunk(self, index: int, delta: Delta, reason: FinishReason | None = None) -> Event:
        choice = ChunkChoice(index=index, delta=delta, finish_reason=reason)
        if scores := self._scores.pop(index, None):
            choice.logprobs = chat_logprobs_of(scores)
        return event(self._body([choice], None))

    def _body(self, choices: list[ChunkChoice], usage: Usage | None) -> ChatChunk:
        frame = self._frame
        body = ChatChunk(
            id=frame.id, created=frame.created, model=frame.model, choices=choices, system_fingerprint=frame.fingerprint
        )
        if self._is_counted:
            body.usage = usage
        return body


def has_logprobs(group: Group, index: int) -> bool:
    """Return whether an item reports log-probabilities."""
    return getattr(group.calls[index].params, LOGPROBS, None) is not None


def image_url(data: bytes) -> str:
    """Return a PNG as a data URL."""
    return f"data:image/png;base64,{pybase64.b64encode_as_string(data)}"


def part_delta(part: Part, reader: AnswerReader) -> Delta | None:
    """Return the delta of a part of the text, None for the end of a call."""
    match part:
        case Content():
            return Delta(content=part.text)
        case Reasoning():
            return Delta(reasoning_content=part.text)
        case CallBegin():
            function = FunctionDelta(name=part.name, arguments="")
            call = ToolCallDelta(index=part.index, id=reader.call_id(part.index), type="function", function=function)
        case CallArguments():
            call = ToolCallDelta(index=part.index, function=FunctionDelta(arguments=part.text))
        case CallEnd():
            return None
    return Delta(tool_calls=[call])


def reason_of(group: Group, reader: AnswerReader, index: int) -> FinishReason:
    """Return the finish reason of an item in the terms of OpenAI."""
    if group.done[index].finish_reason == "length":
        return "length"
    return "tool_calls" if reader.calls else "stop"


def usage_of(group: Group, readers: Sequence[AnswerReader]) -> Usage:
    """Return the total usage of all items."""
    usage = msgspec.convert(group.usage, Usage)
    usage.completion_tokens_details.reasoning_tokens = sum(reader.reasoning_tokens for reader in readers)
    return usage


async def _whole_sound(
    frame: ChatFrame, index: int, answer: ChatAnswer, form: AudioFormat, encoder: OutputEncoder
) -> AnswerAudio:
    file = await asyncio.to_thread(encode_whole, form, answer.sound(), encoder.rate, encoder.channels)
    return AnswerAudio(
        id=frame.audio_id(index),
        data=pybase64.b64encode_as_string(file),
        expires_at=frame.created,
        transcript=answer.text(),
    )
