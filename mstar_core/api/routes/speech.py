"""POST /v1/audio/speech: text in, audio out; a whole file, a stream in the same format, or server-sent events."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from sanic.response import HTTPResponse

from mstar_core.api.http.exchange import EVENTS, PING, Exchange, event, streaming
from mstar_core.api.output.audio import AudioFormat, Encoder, audio_format, content_type, encode_whole, stream_encoder
from mstar_core.api.output.encode import EncodedChunk
from mstar_core.api.parse.fields import check_name, openai_parsed, read_body, voice_of
from mstar_core.api.parse.params import ParsedRequest
from mstar_core.api.schema import SpeechDelta, SpeechDone, SpeechRequest, SpeechUsage
from mstar_core.api.service import Session
from mstar_core.errors import MstarError, RequestError, TooLarge
from mstar_core.plugin.spec import ModelSpec


def speech_kind(spec: ModelSpec) -> str:
    """Return `answer` if the sound is a model's answer to the text, `verbatim` if it is the text itself."""
    return "answer" if "chat" in spec.routes else "verbatim"


async def speech(exchange: Exchange) -> HTTPResponse | None:
    """Handle one request. Returns the whole response, or None if it was streamed."""
    service = exchange.service
    service.check_open(exchange.key)
    body, rest = await read_body(exchange, SpeechRequest)
    exchange.take_body_id(body.request_id)
    form = audio_format(body.response_format)
    call = _call(exchange, body, rest)
    async with service.open(call, key=exchange.key, started=exchange.started) as session:
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
    service = exchange.service
    spec = service.model
    check_name(exchange, body.model)
    text = _input(body.input, service.deployment.api.max_speech_chars)
    outputs = ("audio", *(kind for kind in spec.surface("speech").beside if kind != "audio"))
    voice = voice_of(spec, body.voice, "voice")
    params = openai_parsed(exchange, rest, outputs, {"voice": voice} if voice is not None else None)
    warnings = params.warnings
    if body.instructions:
        warnings = (*warnings, "instructions has no effect on this model")
    return ParsedRequest(
        request_id=exchange.request_id, route=exchange.route, text=text, order=[("text", 0)], outputs=outputs,
        params=params.params, seed=params.seed, timeout_s=params.timeout_s, warnings=warnings,
    )  # fmt: skip


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
    session.count(done)
    exchange.warn(done.warnings)
    file = await asyncio.to_thread(encode_whole, form, pcm, output.rate, output.channels)
    return exchange.whole(file, content_type(form, output.rate, output.channels))


async def _stream(exchange: Exchange, session: Session, form: AudioFormat) -> None:
    output = session.encoder
    kind = content_type(form, output.rate, output.channels)
    encoder = await _encoder(session, form)
    try:
        async for ready in session.chunks():
            pcm = _sound_of(ready)
            data = await _push(encoder, form, pcm) if pcm else b""
            if data:
                await exchange.write(data, kind, session.live.deadline - exchange.service.clock())
        await exchange.write(await _end(encoder, form), kind)
        session.count(session.done())
    except MstarError as error:
        if exchange.has_begun:  # an audio body cannot carry an error: only an aborted connection signals it
            exchange.abort(drops=error.code == "stalled")
        raise
    await exchange.end()


async def _events(exchange: Exchange, session: Session, form: AudioFormat) -> None:
    encoder = await _encoder(session, form)
    async with streaming(exchange):
        async for ready in session.chunks():
            pcm = _sound_of(ready)
            data = await _push(encoder, form, pcm) if pcm else b""
            if data:
                await exchange.write(_delta(data), EVENTS, session.live.deadline - exchange.service.clock())
            elif not ready:
                await exchange.write(PING, EVENTS)
        rest = await _end(encoder, form)
        done = session.done()
        session.count(done)
        usage = done.usage
        tokens = SpeechUsage(
            input_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"],
            total_tokens=usage["total_tokens"],
        )  # fmt: skip
        last = event(SpeechDone(usage=tokens, warnings=list(done.warnings)))
        await exchange.write((_delta(rest) if rest else b"") + last, EVENTS)


def _sound_of(chunks: list[EncodedChunk]) -> bytes:
    pcm = [chunk.data for chunk in chunks if chunk.modality == "audio"]
    return pcm[0] if len(pcm) == 1 else b"".join(pcm)


async def _encoder(session: Session, form: AudioFormat) -> Encoder:
    output = session.encoder
    if not form.codec:
        return stream_encoder(form, output.rate, output.channels)
    return await asyncio.to_thread(stream_encoder, form, output.rate, output.channels)


async def _end(encoder: Encoder, form: AudioFormat) -> bytes:
    return await asyncio.to_thread(encoder.end) if form.codec else encoder.end()


async def _push(encoder: Encoder, form: AudioFormat, pcm: bytes) -> bytes:
    return await asyncio.to_thread(encoder.push, pcm) if form.codec else encoder.push(pcm)


def _delta(data: bytes) -> bytes:
    return event(SpeechDelta(audio=base64.b64encode(data).decode()))
