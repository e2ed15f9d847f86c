"""POST /v1/audio/speech: text in, audio out; a whole file, a stream in the same format, or server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from sanic.response import HTTPResponse

from mstar_core.api.exchange import Exchange
from mstar_core.api.http.json_lines import NDJSON
from mstar_core.api.output.audio import audio_format, content_type
from mstar_core.api.output.kept_events import EVENTS
from mstar_core.api.parse.capabilities import check_capability
from mstar_core.api.parse.constraint import TextForm
from mstar_core.api.parse.params import LiveText, ParsedRequest, RequestParams, check_order, mapped_fields
from mstar_core.api.parse.tools import ChatOptions
from mstar_core.api.routes.chat import chat_call
from mstar_core.api.routes.fields import check_name, openai_parsed, read_body, voice_of
from mstar_core.api.routes.sound.sound_stream import Ending, SoundSource, send_sound, send_sound_events
from mstar_core.api.routes.sound.speech_lines import ending_body, read_lines, spoken_lines
from mstar_core.api.routes.sound.voices import recording_of
from mstar_core.api.schema import ChatMessage, SpeechRequest
from mstar_core.api.service import Session
from mstar_core.constraints.content import ChosenText
from mstar_core.errors import RequestError, TooLarge
from mstar_core.plugin.processor import MediaPart
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import Audio
from mstar_core.sound_files import AudioFormat, encode_whole

READ_ALOUD: Final = "Read this text aloud, word for word:\n{text}"
"""Question to a model that answers, which makes the text a likely answer."""


def speech_kind(spec: ModelSpec) -> str:
    """Return `answer` if the sound is a model's answer to the text, `verbatim` if it is the text itself."""
    return "answer" if "chat" in spec.routes else "verbatim"


async def speech(exchange: Exchange) -> HTTPResponse | None:
    """Handle one request. Returns the whole response, or None if it was streamed."""
    if exchange.content_type.partition(";")[0].strip().lower() == NDJSON:
        await _speech_of_lines(exchange)
        return None
    body, rest = await read_body(exchange, SpeechRequest)
    reads = _reads(exchange.service.model, body)
    call = await (await _calls(exchange, body, rest, reads=reads))(body.input)
    call = replace(call, is_heard=body.stream_format == "sse" or bool(body.stream))
    form, audio = audio_format(body.response_format), _begin(exchange, body, reads=reads)
    async with exchange.open(call) as session:
        exchange.warn(session.warnings)
        if body.stream_format == "sse":
            await send_sound_events(exchange, _source(exchange, session), form, audio)
        elif body.stream:
            await send_sound(exchange, _source(exchange, session), form, audio)
        else:
            return await _whole(exchange, session, form, audio)
    return None


async def _speech_of_lines(exchange: Exchange) -> None:
    """Speak the text of the body's lines while they arrive. The response is always a stream."""
    body, rest, texts = await read_lines(exchange)
    if not _reads(exchange.service.model, body, default=True):
        raise RequestError(
            "lines are read aloud, but verbatim is false",
            hint="send the whole text as application/json",
            field="verbatim",
        )
    form, audio = audio_format(body.response_format), _begin(exchange, body, reads=True)
    send = send_sound_events if body.stream_format == "sse" else send_sound
    calls = await _calls(exchange, body, rest, reads=True)
    async with ending_body(exchange), spoken_lines(exchange, texts, calls) as source:
        await send(exchange, source, form, audio)


def _reads(spec: ModelSpec, body: SpeechRequest, *, default: bool = False) -> bool:
    """Return whether the text is read aloud. default: for a model that answers. Raises RequestError."""
    if speech_kind(spec) == "answer":
        return default if body.verbatim is None else body.verbatim
    if body.verbatim is False:
        raise RequestError("this model answers no text", hint="omit verbatim: it reads aloud", field="verbatim")
    return True


def _begin(exchange: Exchange, body: SpeechRequest, *, reads: bool) -> Audio:
    """Set what the response says of its sound."""
    spec = exchange.service.model
    audio = spec.output("audio")
    assert isinstance(audio, Audio)
    exchange.keep_events(EVENTS if body.stream_format == "sse" else None)
    exchange.headers["X-Sample-Rate"] = str(audio.rate)
    exchange.headers["X-Speech"] = "verbatim" if reads else "answer"
    return audio


async def _calls(
    exchange: Exchange, body: SpeechRequest, rest: dict[str, Any], *, reads: bool
) -> Callable[[str | LiveText], Awaitable[ParsedRequest]]:
    """Return a function that makes the request of a text, whole or arriving.

    Raises RequestError, NotFound, UnsupportedType, BadMedia.
    """
    spec = exchange.service.model
    check_name(exchange, body.model)
    cloned = await recording_of(exchange, body)
    voice = None if cloned.is_voice else voice_of(spec, body.voice, "voice")
    offered = {"voice": voice, "instructions": body.instructions or None}
    params = openai_parsed(exchange, {**cloned.params, **rest}, speech_outputs(spec), offered)
    if body.instructions and "instructions" not in mapped_fields(spec, exchange.route):
        params = replace(params, warnings=(*params.warnings, "instructions has no effect on this model"))

    async def call(text: str | LiveText) -> ParsedRequest:
        if isinstance(text, LiveText):
            return live_call(exchange, text, params, cloned.media)
        if reads and speech_kind(spec) == "answer":
            return await held_call(exchange, text, params)
        return spoken_call(exchange, text, params, cloned.media)

    return call


async def held_call(exchange: Exchange, text: str, params: RequestParams) -> ParsedRequest:
    """Return the request in which a model that answers says a text: its answer is held to exactly these characters.

    Its language model reads one token after the other as its own answer, so the speech model gets what it gets of any
    answer. Raises RequestError, TooLarge.
    """
    spec = exchange.service.model
    text = _input(text, exchange.service.deployment.api.max_speech_chars).strip()
    check_capability(spec, "structured_outputs", "verbatim")
    messages = [ChatMessage(role="user", content=READ_ALOUD.format(text=text))]
    outputs = tuple(dict.fromkeys(("text", *speech_outputs(spec))))
    form = TextForm("input", ChosenText(texts=(text,)))
    return await chat_call(exchange, messages, outputs, ChatOptions(thinks=False), params, form)


def spoken_call(
    exchange: Exchange, text: str, params: RequestParams, recording: Sequence[MediaPart] = ()
) -> ParsedRequest:
    """Return the request that speaks a text. recording: of a cloned voice. Raises RequestError, TooLarge."""
    service = exchange.service
    text = _input(text, service.deployment.api.max_speech_chars)
    return params.request(
        exchange.request_id,
        exchange.route,
        text=text,
        media=recording,
        order=check_order(service.model, None, text, recording) if recording else [("text", 0)],
        outputs=speech_outputs(service.model),
    )


def live_call(
    exchange: Exchange, text: LiveText, params: RequestParams, recording: Sequence[MediaPart] = ()
) -> ParsedRequest:
    """Return the request that speaks a text while it arrives. recording: of a cloned voice."""
    outputs = speech_outputs(exchange.service.model)
    order = [*(("audio", number) for number, _ in enumerate(recording)), ("text", 0)]
    call = params.request(exchange.request_id, exchange.route, text="", media=recording, order=order, outputs=outputs)
    return replace(call, live=text)


def speech_outputs(spec: ModelSpec) -> tuple[str, ...]:
    """Return the modalities of a spoken text."""
    return ("audio", *(kind for kind in spec.surface("speech").beside if kind != "audio"))


def _input(text: str, limit: int) -> str:
    if not text.strip():
        raise RequestError("input is empty", hint=f"send 1 to {limit} characters", field="input")
    if len(text) > limit:
        raise TooLarge(
            f"input has {len(text)} characters, the limit is {limit}",
            hint=f"split the text into several requests, or send it as lines of {NDJSON}",
            field="input",
            code="body_too_large",
        )
    return text


def _source(exchange: Exchange, session: Session) -> SoundSource:
    async def pcm() -> AsyncIterator[bytes | None]:
        async for ready in session.chunks():
            yield b"".join([chunk.data for chunk in ready if chunk.modality == "audio"]) if ready else None

    def end() -> Ending:
        done = session.done()
        return Ending(usage=done.usage, warnings=done.warnings)

    return SoundSource(pcm=pcm(), end=end, left_s=lambda: session.live.deadline - exchange.service.clock())


async def _whole(exchange: Exchange, session: Session, form: AudioFormat, audio: Audio) -> HTTPResponse:
    pcm = b"".join([chunk.data async for ready in session.chunks() for chunk in ready if chunk.modality == "audio"])
    done = session.done()
    exchange.warn(done.warnings)
    file = await asyncio.to_thread(encode_whole, form, pcm, audio.rate, audio.channels)
    return exchange.whole(file, content_type(form, audio.rate, audio.channels))
