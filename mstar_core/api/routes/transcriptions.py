"""POST /v1/audio/transcriptions and /v1/audio/translations: audio in, its transcript out in one of several formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from sanic.response import HTTPResponse

from mstar_core.api.exchange import PING, Exchange, event, streaming
from mstar_core.api.http.body import UploadedFile
from mstar_core.api.joined import RunningRequest, open_request
from mstar_core.api.output.kept_events import EVENTS
from mstar_core.api.output.transcript import Transcript
from mstar_core.api.parse.media import part_of_upload
from mstar_core.api.parse.params import ParsedRequest, mapped_fields
from mstar_core.api.routes.fields import check_name, openai_parsed, read_multipart
from mstar_core.api.schema import (
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    TranscriptionRequest,
    TranslationRequest,
    Usage,
)
from mstar_core.errors import RequestError
from mstar_core.families.languages import LANGUAGES
from mstar_core.plugin.processor import MediaPart
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import Segments

PLAIN: Final = "text/plain; charset=utf-8"
TIMED: Final = ("verbose_json", "srt", "vtt")
SUBTITLES: Final = {"srt": PLAIN, "vtt": "text/vtt; charset=utf-8"}
SEGMENTS: Final = Segments.kind


async def transcription(exchange: Exchange) -> HTTPResponse | None:
    """Handle one request. Returns the whole response, or None if it was streamed."""
    body, rest, files = await read_multipart(exchange, TranscriptionRequest)
    return await _answer(exchange, body, rest, files)


async def translation(exchange: Exchange) -> HTTPResponse | None:
    """Handle a request for English text."""
    body, rest, files = await read_multipart(exchange, TranslationRequest)
    plain = TranscriptionRequest(model=body.model, prompt=body.prompt, response_format=body.response_format)
    return await _answer(exchange, plain, rest, files)


async def _answer(
    exchange: Exchange, body: TranscriptionRequest, rest: dict[str, Any], files: Sequence[UploadedFile]
) -> HTTPResponse | None:
    service, file = exchange.service, _file(files)
    _check_form(service.model, body)
    call = _call(exchange, body, rest, file)
    exchange.keep_events(EVENTS if body.stream else None)
    async with open_request(exchange, call) as session:
        exchange.warn(session.warnings)
        if not body.stream:
            return await _whole(exchange, session, body)
        await _stream(exchange, session)
    return None


def _check_form(spec: ModelSpec, body: TranscriptionRequest) -> None:
    """Raise RequestError for a form of the response that the model or the stream does not have."""
    if body.response_format in TIMED and spec.output(SEGMENTS) is None:
        raise RequestError(
            f"response_format {body.response_format} needs timestamps, which the model does not provide",
            hint="use json or text",
            field="response_format",
            code="unsupported_parameter",
        )
    if body.granularities and body.response_format != "verbose_json":
        field = "timestamp_granularities"
        raise RequestError(f"{field} needs response_format verbose_json", hint="omit one of them", field=field)
    if body.stream and body.response_format in TIMED:
        hint = "use json or text, or omit stream"
        raise RequestError(f"a stream is no {body.response_format}", hint=hint, field="stream")


def _file(files: Sequence[UploadedFile]) -> MediaPart:
    for field in (file.field for file in files):
        if field != "file":
            raise RequestError(
                f"{field[:40]} is not supported by this route", hint="upload the audio as `file`", field=field[:40]
            )
    if len(files) != 1:
        what = "file is missing" if not files else f"file was sent {len(files)} times"
        code = "missing_field" if not files else "invalid_value"
        raise RequestError(what, hint="upload one audio file as `file`", field="file", code=code)
    return part_of_upload("file", files[0], "audio")


def _call(exchange: Exchange, body: TranscriptionRequest, rest: dict[str, Any], file: MediaPart) -> ParsedRequest:
    spec = exchange.service.model
    check_name(exchange, body.model)
    is_timed, words = body.response_format in TIMED, "word" in body.granularities
    outputs = ("text", SEGMENTS) if is_timed else ("text",)
    offered = {"language": body.language, "prompt": body.prompt, "stream": body.stream or None}
    # A model may map these fields, which no client sends.
    times = {"timestamps": is_timed or None, "words": words or None}
    params = openai_parsed(exchange, rest, outputs, {**offered, **times})
    text = instruction(spec, body, exchange.route)
    order = [("audio", 0), *([("text", 0)] if text else [])]
    return params.request(exchange.request_id, exchange.route, text=text, media=(file,), order=order, outputs=outputs)


def instruction(spec: ModelSpec, body: TranscriptionRequest, route: str = "transcription") -> str | None:
    """Return the text that accompanies the audio: the model's instruction, and the prompt if no parameter maps it."""
    surface, mapped = spec.surface(route), mapped_fields(spec, route)
    words = surface.instruction_without_language or surface.instruction.replace("{language}", "").strip()
    if body.language is not None and "language" not in mapped:
        words = surface.instruction.replace("{language}", LANGUAGES.get(body.language.lower(), body.language))
    prompt = body.prompt if "prompt" not in mapped else None
    return "\n".join(part for part in (words, prompt) if part) or None


async def _whole(exchange: Exchange, session: RunningRequest, body: TranscriptionRequest) -> HTTPResponse:
    parts, transcript = list[bytes](), Transcript()
    async for ready in session.chunks():
        parts += [chunk.data for chunk in ready if chunk.modality == "text"]
        for chunk in ready:
            if chunk.modality == SEGMENTS:
                transcript.add(chunk.data, chunk.metadata)
    done = session.done()
    exchange.warn(done.warnings)
    text = b"".join(parts).decode().strip()
    usage = msgspec.convert(done.usage, Usage)
    match body.response_format:
        case "json":
            return exchange.json(Transcription(text=text, usage=usage))
        case "text":
            return exchange.whole(f"{text}\n".encode(), PLAIN)
        case "verbose_json":
            task = "translate" if exchange.route == "translation" else "transcribe"
            return exchange.json(transcript.verbose(text, task, body.granularities, usage))
        case form:
            return exchange.whole(transcript.subtitles(form).encode(), SUBTITLES[form])


async def _stream(exchange: Exchange, session: RunningRequest) -> None:
    text = ""
    async with streaming(exchange):
        async for ready in session.chunks():
            pieces = [chunk.data.decode() for chunk in ready if chunk.modality == "text"]
            text += "".join(pieces)
            left_s = session.live.deadline - exchange.service.clock()
            if pieces:
                await exchange.send([event(TranscriptDelta(delta=piece)) for piece in pieces], EVENTS, left_s)
            elif not ready:
                await exchange.keep_alive(PING, EVENTS, left_s)
        done = session.done()
        usage = msgspec.convert(done.usage, Usage)
        await exchange.send([event(TranscriptDone(text=text.strip(), usage=usage))], EVENTS, is_last=True)
