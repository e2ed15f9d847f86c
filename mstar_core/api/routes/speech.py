"""POST /v1/audio/speech: text in, audio out; a whole file, a stream in the same format, or server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from sanic.response import HTTPResponse

from mstar_core.api.exchange import Exchange
from mstar_core.api.http.json_lines import NDJSON
from mstar_core.api.output.audio import audio_format, content_type
from mstar_core.api.output.kept_events import EVENTS
from mstar_core.api.parse.params import ParsedRequest, RequestParams
from mstar_core.api.routes.fields import check_name, openai_parsed, read_body, voice_of
from mstar_core.api.routes.sound_stream import Ending, SoundSource, send_sound, send_sound_events
from mstar_core.api.routes.speech_lines import ending_body, read_lines, spoken_sentences
from mstar_core.api.schema import SpeechRequest
from mstar_core.api.service import Session
from mstar_core.errors import RequestError, TooLarge
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import Audio
from mstar_core.sound_files import AudioFormat, encode_whole


def speech_kind(spec: ModelSpec) -> str:
    """Return `answer` if the sound is a model's answer to the text, `verbatim` if it is the text itself."""
    return "answer" if "chat" in spec.routes else "verbatim"


async def speech(exchange: Exchange) -> HTTPResponse | None:
    """Handle one request. Returns the whole response, or None if it was streamed."""
    if exchange.content_type.partition(";")[0].strip().lower() == NDJSON:
        await _speech_of_lines(exchange)
        return None
    service = exchange.service
    body, rest = await read_body(exchange, SpeechRequest)
    call = _calls(exchange, body, rest)(body.input)
    form, audio = audio_format(body.response_format), _begin(exchange, body)
    async with service.open(
        call, key=exchange.key, started=exchange.started, delivery=exchange.delivery, adapter=exchange.adapter
    ) as session:
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
    if speech_kind(exchange.service.model) == "answer":
        raise RequestError(
            "this model answers a text and does not read it aloud",
            hint="send the whole text as application/json",
            field="Content-Type",
        )
    body, rest, texts = await read_lines(exchange)
    form, audio = audio_format(body.response_format), _begin(exchange, body)
    send = send_sound_events if body.stream_format == "sse" else send_sound
    async with ending_body(exchange), spoken_sentences(exchange, texts, _calls(exchange, body, rest)) as source:
        await send(exchange, source, form, audio)


def _begin(exchange: Exchange, body: SpeechRequest) -> Audio:
    """Set what the response says of its sound."""
    spec = exchange.service.model
    audio = spec.output("audio")
    assert isinstance(audio, Audio)
    exchange.keep_events(EVENTS if body.stream_format == "sse" else None)
    exchange.headers["X-Sample-Rate"] = str(audio.rate)
    exchange.headers["X-Speech"] = speech_kind(spec)
    return audio


def _calls(exchange: Exchange, body: SpeechRequest, rest: dict[str, Any]) -> Callable[[str], ParsedRequest]:
    """Return a function that makes the request of a text. Raises RequestError, NotFound."""
    spec = exchange.service.model
    check_name(exchange, body.model)
    voice = voice_of(spec, body.voice, "voice")
    params = openai_parsed(exchange, rest, speech_outputs(spec), {"voice": voice} if voice is not None else None)
    if body.instructions:
        params = replace(params, warnings=(*params.warnings, "instructions has no effect on this model"))
    return lambda text: spoken_call(exchange, text, params)


def spoken_call(exchange: Exchange, text: str, params: RequestParams) -> ParsedRequest:
    """Return the request that speaks a text. Raises RequestError, TooLarge."""
    service = exchange.service
    text = _input(text, service.deployment.api.max_speech_chars)
    return params.request(
        exchange.request_id, exchange.route, text=text, order=[("text", 0)], outputs=speech_outputs(service.model)
    )


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
