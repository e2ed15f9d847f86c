"""POST /generate: any modalities in, any out; streamed as lines or frames, or as one JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sanic.response import HTTPResponse

from mstar_core.api.exchange import Exchange, streaming
from mstar_core.api.http.body import Form, UploadedFile, check_size, read_form
from mstar_core.api.http.strict_json import parse_object
from mstar_core.api.joined import RunningRequest, open_request
from mstar_core.api.output.line_formats import (
    BINARY,
    FRAMES,
    LINES,
    LineFormat,
    chunk_lines,
    joined_chunks,
    whole_outputs,
)
from mstar_core.api.output.usage import native_usage
from mstar_core.api.parse.constraint import TextFormFields, constraint_of, output_limit, read_text_form
from mstar_core.api.parse.media import decoded, part_of_upload
from mstar_core.api.parse.params import ParsedRequest, check_order, check_outputs, check_params, constrained
from mstar_core.api.parse.tools import ChatOptions, read_effort
from mstar_core.api.routes.fields import check_name, check_session, json_or_text, rules_of, typed
from mstar_core.api.schema import GenerateRequest
from mstar_core.api.service import Completion
from mstar_core.errors import RequestError, TooLarge
from mstar_core.plugin.params import parse_bool
from mstar_core.plugin.processor import MediaPart
from mstar_core.plugin.surface import PARTIAL_IMAGE, PROGRESS

OWN: Final = frozenset(GenerateRequest.__struct_fields__)
JSON_FIELDS: Final = ("response_format", "choice")
"""Fields that forms send as JSON."""


@dataclasses.dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Fields of /generate that are not model parameters."""

    is_streamed: bool
    is_full: bool
    form: LineFormat


async def generate(exchange: Exchange) -> HTTPResponse | None:
    """Handle one request. The response was sent when this returns."""
    service = exchange.service
    exchange.check_open()
    form = await read_form(exchange, exchange.content_type, exchange.limits)
    exchange.take_body_id(form.fields.get("request_id"))
    options = _options_of(exchange, form)
    call = dataclasses.replace(await _call(exchange, form), is_heard=options.is_streamed)
    exchange.keep_events(options.form.content_type if options.is_streamed else None)
    if options.is_streamed and options.is_full:
        told = ((PROGRESS, service.emits_progress), (PARTIAL_IMAGE, service.emits_partial_images))
        call = dataclasses.replace(call, outputs=(*call.outputs, *(kind for kind, is_made in told if is_made)))
    async with open_request(exchange, call) as session:
        exchange.warn(session.warnings)
        if options.is_streamed:
            await _stream(exchange, session, options)
        else:
            await exchange.answer(await _whole(exchange, session, options))
    return None


def _options_of(exchange: Exchange, form: Form) -> GenerateOptions:
    fields = {name: value for name, value in form.fields.items() if value is not None}
    if "streaming" in fields and "stream" in fields:
        raise RequestError("streaming and stream are the same field", hint="send only one of them", field="stream")
    value = fields.get("streaming", fields.get("stream"))
    is_streamed = True if value is None else parse_bool(value)
    if is_streamed is None:
        raise RequestError("streaming must be true or false", field="streaming", allowed="true, false")
    events = fields.get("stream_events")
    if events not in (None, "data", "full"):
        raise RequestError("stream_events must be data or full", field="stream_events", allowed="data, full")
    is_binary = FRAMES in (exchange.request.headers.get("accept") or "")
    return GenerateOptions(is_streamed, is_binary or events == "full", BINARY if is_binary else LINES)


async def _call(exchange: Exchange, form: Form) -> ParsedRequest:
    spec, fields = exchange.service.model, form.fields
    check_name(exchange, fields.get("model"))
    session = check_session(fields.get("session_id"))
    outputs = check_outputs(spec, _names(fields.get("output_modalities"), "output_modalities"))
    sent = _sent_params(fields)
    asked = read_text_form(spec, _asked_fields(fields, sent), outputs)
    checked = check_params(spec, sent, rules_of(exchange, outputs))
    text = fields.get("text")
    if text is not None and not isinstance(text, str):
        raise RequestError("text must be a string", field="text")
    check_size("text", len((text or "").encode()), exchange.limits)
    media = _media([*form.files, *await _json_files(fields.get("files"), exchange)])
    if not (text or "").strip() and not media and getattr(checked.params, "prompt_token_ids", None) is None:
        field, hint = ("files", "send files") if spec.input("text") is None else ("text", "send text or files")
        raise RequestError("the request has no input", hint=hint, field=field, code="missing_field")
    order = check_order(spec, _names(fields.get("input_modalities"), "input_modalities"), text, media)
    if asked is not None:
        _, begins_open = read_effort(spec, None, "reasoning_effort")
        options, limit = ChatOptions(begins_open=begins_open), output_limit(checked.params)
        constraint = await constraint_of(spec, options, asked, exchange.service.grammars, limit)
        if constraint is not None:
            checked = dataclasses.replace(checked, params=constrained(checked.params, constraint))
    call = checked.request(exchange.request_id, exchange.route, text=text, media=media, order=order, outputs=outputs)
    return dataclasses.replace(call, session=session)


def _sent_params(fields: dict[str, Any]) -> dict[str, Any]:
    kwargs = fields.get("model_kwargs")
    if isinstance(kwargs, str):
        kwargs = parse_object(kwargs, "model_kwargs") if kwargs.strip() else {}
    if kwargs is not None and not isinstance(kwargs, dict):
        raise RequestError("model_kwargs must be a JSON object", field="model_kwargs", code="invalid_json")
    return {**{name: value for name, value in fields.items() if name not in OWN}, **(kwargs or {})}


def _asked_fields(fields: Mapping[str, Any], params: dict[str, Any]) -> TextFormFields:
    """Return the fields that hold the text to a form, and take those out of the parameters, which win."""
    sent = {name: params.pop(name, fields.get(name)) for name in TextFormFields.__struct_fields__}
    asked, _ = typed(
        {name: json_or_text(value) if name in JSON_FIELDS else value for name, value in sent.items()}, TextFormFields
    )
    return asked


def _names(value: Any, field: str) -> list[str] | None:
    if value is None or value == "":
        return None
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise RequestError(f"{field} must be a list of names", hint="separate the names with commas", field=field)
    return [item.strip().lower() for item in items if item.strip()] or None


async def _json_files(value: Any, exchange: Exchange) -> list[UploadedFile]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError("files must be a list of objects", hint='send [{"name", "data"}]', field="files")
    if len(value) > exchange.limits.max_files:
        raise TooLarge(f"the request has more than {exchange.limits.max_files} files", code="too_many_files")
    return [await _json_file(item) for item in value]


async def _json_file(item: dict[str, Any]) -> UploadedFile:
    if not isinstance(item.get("data"), str):
        raise RequestError("a file has no base64 `data`", field="files")
    return UploadedFile("files", str(item.get("name") or ""), "", await decoded("files", item["data"]))


def _media(files: Sequence[UploadedFile]) -> list[MediaPart]:
    for field in (file.field[:40] for file in files if file.field not in ("files", "files[]")):
        raise RequestError(f"{field} is not a file field", hint="upload files as `files`", field=field)
    return [part_of_upload("files", file) for file in files]


async def _whole(exchange: Exchange, session: RunningRequest, options: GenerateOptions) -> HTTPResponse:
    chunks = [chunk async for ready in session.chunks() for chunk in ready]
    done = session.done()
    exchange.warn(done.warnings)
    if options.form.content_type == FRAMES:
        lines = [buffer for line in chunk_lines(options.form, joined_chunks(chunks)) for buffer in line]
        lines = [*lines, _done_line(session, done, options.form)]
        return exchange.whole(b"".join([_start_line(exchange, session, options.form), *lines]), FRAMES)
    body = {
        "request_id": exchange.request_id,
        "outputs": whole_outputs(chunks),
        "finish_reason": done.finish_reason,
        "usage": native_usage(done.usage, session.encoder, done.times_ms),
        "seed": session.call.seed,
        "warnings": list(done.warnings),
    }
    return exchange.json(body)


async def _stream(exchange: Exchange, session: RunningRequest, options: GenerateOptions) -> None:
    form = options.form

    async with streaming(exchange, form.content_type):
        if options.is_full:
            await exchange.send([(_start_line(exchange, session, form),)], form.content_type)
        async for chunks in session.chunks():
            left_s = session.live.deadline - exchange.service.clock()
            if chunks:
                await exchange.send(chunk_lines(form, chunks), form.content_type, left_s)
            elif form.keepalive:
                await exchange.keep_alive(form.keepalive, form.content_type, left_s)
        done = session.done()
        if options.is_full:
            await exchange.send([(_done_line(session, done, form),)], form.content_type, is_last=True)
        else:
            await exchange.write(b"", form.content_type)


def _start_line(exchange: Exchange, session: RunningRequest, form: LineFormat) -> bytes:
    facts = {"request_id": exchange.request_id, "seed": session.call.seed, "model": exchange.served_name}
    return form.line("start", b"", facts)


def _done_line(session: RunningRequest, done: Completion, form: LineFormat) -> bytes:
    usage = native_usage(done.usage, session.encoder, done.times_ms)
    return form.line(
        "done", b"", {"finish_reason": done.finish_reason, "usage": usage, "warnings": list(done.warnings)}
    )
