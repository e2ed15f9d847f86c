"""POST /v1/audio/transcriptions: audio in, its transcript out as JSON, plain text or server-sent events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from sanic.response import HTTPResponse

from mstar_core.api.exchange import PING, Exchange, event, streaming
from mstar_core.api.http.body import UploadedFile
from mstar_core.api.output.kept_events import EVENTS
from mstar_core.api.parse.media import part_of_upload
from mstar_core.api.parse.params import ParsedRequest, mapped_fields
from mstar_core.api.routes.fields import check_name, openai_parsed, read_multipart
from mstar_core.api.schema import TranscriptDelta, TranscriptDone, Transcription, TranscriptionRequest, Usage
from mstar_core.api.service import Session
from mstar_core.errors import RequestError
from mstar_core.plugin.processor import MediaPart
from mstar_core.plugin.spec import ModelSpec

TEXT = "text/plain; charset=utf-8"
TIMED = ("verbose_json", "srt", "vtt")
LANGUAGES: Final[Mapping[str, str]] = {
    "ar": "Arabic",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "fi": "Finnish",
    "fr": "French",
    "he": "Hebrew",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "ms": "Malay",
    "nl": "Dutch",
    "no": "Norwegian",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "ur": "Urdu",
    "vi": "Vietnamese",
    "yue": "Cantonese",
    "zh": "Chinese",
}
"""English names of ISO 639 codes, for instructions. Other values of `language` are used as they are."""


async def transcription(exchange: Exchange) -> HTTPResponse | None:
    """Handle one request. Returns the whole response, or None if it was streamed."""
    service = exchange.service
    body, rest, files = await read_multipart(exchange, TranscriptionRequest)
    file = _file(files)
    if body.response_format in TIMED:
        raise RequestError(
            f"response_format {body.response_format} needs timestamps, which the model does not provide",
            hint="use json or text",
            field="response_format",
            code="unsupported_parameter",
        )
    call = _call(exchange, body, rest, file)
    exchange.keep_events(EVENTS if body.stream else None)
    async with service.open(
        call, key=exchange.key, started=exchange.started, delivery=exchange.delivery, adapter=exchange.adapter
    ) as session:
        exchange.warn(session.warnings)
        if not body.stream:
            return await _whole(exchange, session, body.response_format)
        await _stream(exchange, session)
    return None


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
    params = openai_parsed(exchange, rest, ("text",), {"language": body.language, "prompt": body.prompt})
    text = instruction(spec, body)
    order = [("audio", 0), *([("text", 0)] if text else [])]
    return params.request(exchange.request_id, exchange.route, text=text, media=(file,), order=order, outputs=("text",))


def instruction(spec: ModelSpec, body: TranscriptionRequest) -> str | None:
    """Return the text that accompanies the audio: the model's instruction, and the prompt if no parameter maps it."""
    surface = spec.surface("transcription")
    mapped = mapped_fields(spec, "transcription")
    words = surface.instruction_without_language or surface.instruction.replace("{language}", "").strip()
    if body.language is not None and "language" not in mapped:
        words = surface.instruction.replace("{language}", LANGUAGES.get(body.language.lower(), body.language))
    prompt = body.prompt if "prompt" not in mapped else None
    return "\n".join(part for part in (words, prompt) if part) or None


async def _whole(exchange: Exchange, session: Session, form: str) -> HTTPResponse:
    parts = [chunk.data async for ready in session.chunks() for chunk in ready if chunk.modality == "text"]
    done = session.done()
    exchange.warn(done.warnings)
    text = b"".join(parts).decode().strip()
    if form == "text":
        return exchange.whole(f"{text}\n".encode(), TEXT)
    return exchange.json(Transcription(text=text, usage=msgspec.convert(done.usage, Usage)))


async def _stream(exchange: Exchange, session: Session) -> None:
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
