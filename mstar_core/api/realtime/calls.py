"""Requests that a realtime session makes: answers, speech and transcripts, in the forms of the other routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mstar_core.api.exchange import Exchange
from mstar_core.api.parse.params import ParsedRequest, RequestParams
from mstar_core.api.parse.tools import ChatOptions, read_effort, read_tools
from mstar_core.api.realtime.chat_form import chat_layout
from mstar_core.api.realtime.history import MOST_ITEMS
from mstar_core.api.realtime.items import Entry, HeardPart, MessageEntry, PicturePart, text_of
from mstar_core.api.realtime.settings import RealtimeSettings, TranscriptRules
from mstar_core.api.routes.chat import chat_call
from mstar_core.api.routes.fields import openai_parsed
from mstar_core.api.routes.sound.speech import speech_outputs, spoken_call
from mstar_core.api.routes.transcriptions import instruction
from mstar_core.api.schema import TranscriptionRequest
from mstar_core.errors import RequestError
from mstar_core.plugin.chat.turns import ToolChoice
from mstar_core.plugin.processor import MediaPart
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import Audio

TEXT: tuple[str, ...] = ("text",)


def converses(spec: ModelSpec) -> bool:
    """Return whether a model answers. One that does not speaks the text that it gets."""
    return "chat" in spec.routes


def window_s(spec: ModelSpec) -> float:
    """Return the seconds of sound that a model which answers reads at a time; 0 if it reads sounds as a whole."""
    audio = spec.input("audio")
    return audio.window_s if isinstance(audio, Audio) and converses(spec) else 0.0


def checked_params(turn: Exchange, settings: RealtimeSettings) -> RequestParams:
    """Return the parameters of a response. Raises RequestError."""
    spec = turn.service.model
    rest: dict[str, Any] = dict(settings.params)
    if settings.limit is not None:
        rest["max_output_tokens"] = settings.limit
    offered = {"voice": settings.voice} if settings.voice is not None else None
    route = "chat" if converses(spec) else "speech"
    return openai_parsed(turn, rest, outputs_of(spec, settings), offered, route)


def outputs_of(spec: ModelSpec, settings: RealtimeSettings) -> tuple[str, ...]:
    """Return the modalities of a response. Speech comes with its text where the model has any."""
    if settings.output == "text":
        return TEXT
    return (*TEXT, "audio") if converses(spec) else speech_outputs(spec)


def checked_tools(spec: ModelSpec, settings: RealtimeSettings, most_bytes: int) -> ChatOptions:
    """Return the options of an answer. Raises RequestError, TooLarge.

    A spoken answer may call functions too: the session sends no sound of a call. A choice without tools has no effect,
    because clients send it before the tools.
    """
    choice = settings.choice if settings.tools else ToolChoice()
    tools = read_tools(spec, settings.tools, choice, TEXT, most_bytes)
    template, begins_open = read_effort(spec, settings.effort, "reasoning.effort")
    return ChatOptions(tools=tools, choice=choice, template=template, begins_open=begins_open)


async def answer_call(
    turn: Exchange, settings: RealtimeSettings, entries: Sequence[Entry], session_id: str
) -> ParsedRequest:
    """Return the request of an answer. turn: the session's exchange with the id and the start of this response.

    session_id: of the session whose cached prefix it continues; empty for none.

    Raises RequestError, which names items, and errors of their media.
    """
    spec = turn.service.model
    params = checked_params(turn, settings)
    if not converses(spec):
        return spoken_call(turn, pending_text(entries), params)
    options = checked_tools(spec, settings, turn.limits.max_text_bytes)
    layout = chat_layout(settings.instructions, entries)
    if not layout.messages:
        raise RequestError("the conversation is empty", hint="create an item, or set instructions", field="input")
    try:
        # A conversation limits its items and its sound by itself: it may have more turns than a request has uploads.
        call = await chat_call(
            turn,
            layout.messages,
            outputs_of(spec, settings),
            options,
            params,
            None,
            most_files=MOST_ITEMS,
            files=layout.files,
        )
    except RequestError as error:
        raise layout.named(error) from error
    for part, file in zip(layout.media, call.media, strict=True):
        if isinstance(part, PicturePart):
            part.remember(file.data)
    return replace(call, session=session_id, reads_windows=window_s(spec) > 0)


def pending_text(entries: Sequence[Entry]) -> str:
    """Return the text of the user behind the last answer, for a model that only speaks."""
    texts: list[str] = []
    for entry in entries:
        if isinstance(entry, MessageEntry):
            texts = [] if entry.role == "assistant" else [*texts, *([text_of(entry)] if entry.role == "user" else [])]
    return " ".join(texts)


def transcript_call(turn: Exchange, rules: TranscriptRules, part: HeardPart) -> ParsedRequest:
    """Return the request of a transcript. Raises RequestError."""
    spec = turn.service.model
    params = openai_parsed(turn, {}, TEXT, {"language": rules.language, "prompt": rules.prompt}, "transcription")
    body = TranscriptionRequest(language=rules.language, prompt=rules.prompt)
    text = instruction(spec, body)
    media = MediaPart(modality="audio", data=part.file)
    order = [("audio", 0), *([("text", 0)] if text else [])]
    return params.request(turn.request_id, turn.route, text=text, media=(media,), order=order, outputs=TEXT)
