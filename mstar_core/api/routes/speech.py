"""POST /v1/audio/speech: text in, sound out; a whole file, a stream in the same format, or server-sent events."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Final

import msgspec
from sanic.response import HTTPResponse

from mstar_core.api.audio import AudioFormat, Encoder, audio_format, content_type, encode_whole, stream_encoder
from mstar_core.api.body import read_json
from mstar_core.api.call import Call, check_model, check_params, openai_params, refuse_unsupported
from mstar_core.api.errors import UnsupportedType, reply_of
from mstar_core.api.exchange import Exchange
from mstar_core.api.routes.generate import fail_stream, model_names
from mstar_core.api.service import Session
from mstar_core.errors import MstarError, RequestError, TooLarge
from mstar_core.plugin.params import param_specs, parse_bool
from mstar_core.plugin.spec import ModelSpec

OWN: Final = frozenset(
    ("model", "input", "response_format", "stream", "stream_format", "speed", "request_id", "instructions")
)
EVENTS: Final = "text/event-stream; charset=utf-8"


async def speech(exchange: Exchange) -> HTTPResponse | None:
    """Answer one request. The answer is whole when a response comes back, streamed already when None does."""
    service = exchange.service
    service.check_open()
    kind = exchange.content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedType("the body is not JSON", hint="send it as application/json")
    body = await read_json(exchange, exchange.limits)
    exchange.name(body.get("request_id"))
    form = audio_format(body.get("response_format") or "wav")
    mode = _mode(body)
    call = _call(exchange, body)
    async with service.open(call, key=exchange.key, started=exchange.started) as session:
        exchange.warn(session.warnings)
        exchange.headers["X-Sample-Rate"] = str(session.presenter.rate)
        match mode:
            case "whole":
                return await _whole(exchange, session, form)
            case "audio":
                await _stream(exchange, session, form)
            case _:
                await _events(exchange, session, form)
    return None


def _mode(body: dict[str, Any]) -> str:
    stream = False if body.get("stream") is None else parse_bool(body["stream"])
    if stream is None:
        raise RequestError("stream is neither true nor false", field="stream", allowed="true, false")
    match body.get("stream_format"):
        case None | "audio":
            return "audio" if stream else "whole"
        case "sse":
            return "sse"
        case _:
            raise RequestError("stream_format is neither audio nor sse", field="stream_format", allowed="audio, sse")


def _call(exchange: Exchange, body: dict[str, Any]) -> Call:
    service = exchange.service
    spec, api = service.model, service.deployment.api
    check_model(spec, model_names(exchange), body.get("model"), strict=api.strict_model)
    refuse_unsupported({name: value for name, value in body.items() if name != "response_format"})
    text = _input(body, api.max_speech_chars)
    given = openai_params(spec, "speech", _with_voice(spec, body), OWN)
    asked = check_params(
        spec, given, request_id=exchange.request_id, unknown=api.unknown_params, limit_s=api.timeout_s,
        header_s=exchange.timeout_header,
    )  # fmt: skip
    warnings = asked.warnings
    if body.get("instructions"):
        warnings = (*warnings, "instructions has no effect on this model")
    return Call(
        request_id=exchange.request_id, route=exchange.route, text=text, order=[("text", 0)], outputs=("audio",),
        params=asked.params, seed=asked.seed, timeout_s=asked.timeout_s, warnings=warnings,
    )  # fmt: skip


def _input(body: dict[str, Any], limit: int) -> str:
    text = body.get("input")
    if text is None:
        raise RequestError("input is missing", hint="send the text to speak", field="input", code="missing_field")
    if not isinstance(text, str) or not text.strip():
        raise RequestError("input is not a text", hint=f"send 1 to {limit} characters", field="input")
    if len(text) > limit:
        raise TooLarge(
            f"input has {len(text)} characters, allowed are {limit}",
            hint="send it in parts",
            field="input",
            code="body_too_large",
        )
    return text


def _with_voice(spec: ModelSpec, body: dict[str, Any]) -> dict[str, Any]:
    voice = body.get("voice")
    if isinstance(voice, dict):
        voice = voice.get("id")
        if voice is None:
            raise RequestError("voice has no id", field="voice")
    known = next((p.choices for p in param_specs(spec.params) if "voice" in (p.name, p.openai)), ())
    if isinstance(voice, str) and voice not in known and voice.lower() in known:
        voice = voice.lower()
    return {**body, "voice": voice}


async def _whole(exchange: Exchange, session: Session, form: AudioFormat) -> HTTPResponse:
    pcm = b"".join([chunk.data async for ready in session.chunks() for chunk in ready if chunk.modality == "audio"])
    presenter = session.presenter
    done = session.done()
    session.count(done)
    exchange.warn(done.warnings)
    file = await asyncio.to_thread(encode_whole, form, pcm, presenter.rate, presenter.channels)
    return exchange.whole(file, content_type(form, presenter.rate, presenter.channels))


async def _stream(exchange: Exchange, session: Session, form: AudioFormat) -> None:
    presenter = session.presenter
    kind = content_type(form, presenter.rate, presenter.channels)
    encoder = await _encoder(session, form)
    try:
        async for ready in session.chunks():
            pcm = b"".join(chunk.data for chunk in ready if chunk.modality == "audio")
            data = await _push(encoder, form, pcm) if pcm else b""
            if data:
                await exchange.write(data, kind, session.live.deadline - exchange.service.clock())
        await exchange.write(await asyncio.to_thread(encoder.end), kind)
        session.count(session.done())
    except MstarError:
        if exchange.has_begun:
            exchange.abort()  # a body of sound has no place for an error: only a cut connection is clear
        raise
    await exchange.end()


async def _events(exchange: Exchange, session: Session, form: AudioFormat) -> None:
    encoder = await _encoder(session, form)
    try:
        async for ready in session.chunks():
            pcm = b"".join(chunk.data for chunk in ready if chunk.modality == "audio")
            data = await _push(encoder, form, pcm) if pcm else b""
            if data:
                await exchange.write(_delta(data), EVENTS, session.live.deadline - exchange.service.clock())
            elif not ready:
                await exchange.write(b": ping\n\n", EVENTS)
        rest = await asyncio.to_thread(encoder.end)
        done = session.done()
        session.count(done)
        usage = done.usage
        tokens = {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
        }
        last = _event({"type": "speech.audio.done", "usage": tokens, "warnings": list(done.warnings)})
        await exchange.write((_delta(rest) if rest else b"") + last, EVENTS)
    except MstarError as error:
        if not exchange.has_begun:
            raise
        await fail_stream(exchange, _event(reply_of(error, exchange.request_id).body), error)
        raise
    await exchange.end()


async def _encoder(session: Session, form: AudioFormat) -> Encoder:
    presenter = session.presenter
    return await asyncio.to_thread(stream_encoder, form, presenter.rate, presenter.channels)


async def _push(encoder: Encoder, form: AudioFormat, pcm: bytes) -> bytes:
    return await asyncio.to_thread(encoder.push, pcm) if form.codec else encoder.push(pcm)


def _delta(data: bytes) -> bytes:
    return _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
