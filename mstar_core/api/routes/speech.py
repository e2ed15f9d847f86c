"""POST /v1/audio/speech: text in, audio out; a whole file, a stream in the same format, or server-sent events."""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from sanic.response import HTTPResponse

from mstar_core.api.exchange import PING, Exchange, event, streaming
from mstar_core.api.output.audio import audio_format, content_type
from mstar_core.api.output.kept_events import EVENTS
from mstar_core.api.parse.params import ParsedRequest, RequestParams
from mstar_core.api.routes.fields import check_name, openai_parsed, read_body, voice_of
from mstar_core.api.schema import SpeechDelta, SpeechDone, SpeechRequest, SpeechUsage
from mstar_core.api.service import Session
from mstar_core.errors import MstarError, RequestError, TooLarge
from mstar_core.plugin.spec import ModelSpec
from mstar_core.sound_files import AudioFormat, Encoder, encode_whole, stream_encoder


def speech_kind(spec: ModelSpec) -> str:
    """Return `answer` if the sound is a model's answer to the text, `verbatim` if it is the text itself."""
    return "answer" if "chat" in spec.routes else "verbatim"


P = ParamSpec("P")
T = TypeVar("T")


async def speech(exchange: Exchange) -> HTTPResponse | None:
    """Handle one request. Returns the whole response, or None if it was streamed."""
    service = exchange.service
    body, rest = await read_body(exchange, SpeechRequest)
    form = audio_format(body.response_format)
    call = _call(exchange, body, rest)
    exchange.keep_events(EVENTS if body.stream_format == "sse" else None)
    async with service.open(
        call, key=exchange.key, started=exchange.started, delivery=exchange.delivery, adapter=exchange.adapter
    ) as session:
        exchange.warn(session.warnings)
        exchange.headers["X-Sample-Rate"] = str(session.encoder.rate)
        exchange.headers["X-Speech"] = speech_kind(service.model)
        if body.stream_format == "sse":
            await _events(exchange, session, form)
        elif body.stream:
            await _stream(exchange, session, form)
        else:
            return await _whole(exchange, session, form)
    return None


def _call(exchange: Exchange, body: SpeechRequest, rest: dict[str, Any]) -> ParsedRequest:
    spec = exchange.service.model
    check_name(exchange, body.model)
    voice = voice_of(spec, body.voice, "voice")
    params = openai_parsed(exchange, rest, speech_outputs(spec), {"voice": voice} if voice is not None else None)
    if body.instructions:
        params = replace(params, warnings=(*params.warnings, "instructions has no effect on this model"))
    return spoken_call(exchange, body.input, params)


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
            hint="split the text into several requests",
            field="input",
            code="body_too_large",
        )
    return text


async def _whole(exchange: Exchange, session: Session, form: AudioFormat) -> HTTPResponse:
    pcm = b"".join([chunk.data async for ready in session.chunks() for chunk in ready if chunk.modality == "audio"])
    output = session.encoder
    done = session.done()
    exchange.warn(done.warnings)
    file = await asyncio.to_thread(encode_whole, form, pcm, output.rate, output.channels)
    return exchange.whole(file, content_type(form, output.rate, output.channels))


async def _stream(exchange: Exchange, session: Session, form: AudioFormat) -> None:
    kind = content_type(form, session.encoder.rate, session.encoder.channels)
    try:
        encoder = await _encoder(exchange, session, form)
        async for data in _pieces(session, form, encoder):
            if data is not None:
                await exchange.write(data, kind, session.live.deadline - exchange.service.clock())
        session.done()
        await exchange.write(await _run(form, encoder.end), kind, is_last=True)
    except MstarError as error:
        if exchange.has_begun:  # an audio body cannot carry an error: only an aborted connection signals it
            exchange.abort(drops=error.code == "stalled")
        raise
    await exchange.end()


async def _events(exchange: Exchange, session: Session, form: AudioFormat) -> None:
    async with streaming(exchange):
        encoder = await _encoder(exchange, session, form)
        async for data in _pieces(session, form, encoder):
            if data:
                await exchange.send([_delta(data)], EVENTS, session.live.deadline - exchange.service.clock())
            elif data is None:
                await exchange.keep_alive(PING, EVENTS)
        rest = await _run(form, encoder.end)
        deltas = [_delta(rest)] if rest else []
        done = session.done()
        usage = done.usage
        tokens = SpeechUsage(
            input_tokens=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
            total_tokens=usage["total_tokens"],
        )
        last = event(SpeechDone(usage=tokens, warnings=list(done.warnings)))
        await exchange.send([*deltas, last], EVENTS, is_last=True)


def _delta(data: bytes) -> tuple[bytes]:
    return event(SpeechDelta(audio=base64.b64encode(data).decode()))


async def _encoder(exchange: Exchange, session: Session, form: AudioFormat) -> Encoder:
    # A process that goes on with the response repeats the number.
    serial = zlib.crc32(f"{exchange.request_id}/{exchange.created}".encode()) >> 1
    return await _run(form, stream_encoder, form, session.encoder.rate, session.encoder.channels, serial)


async def _pieces(session: Session, form: AudioFormat, encoder: Encoder) -> AsyncIterator[bytes | None]:
    """Yield the encoded audio but for the encoder's last bytes, and None after each keep-alive interval without any."""
    async for ready in session.chunks():
        pcm = b"".join([chunk.data for chunk in ready if chunk.modality == "audio"])
        data = await _run(form, encoder.push, pcm) if pcm else b""
        if data or not ready:
            yield data or None


async def _run(form: AudioFormat, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function of an encoder, on a thread if the format has a codec."""
    return await asyncio.to_thread(call, *args, **kwargs) if form.codec else call(*args, **kwargs)
