"""Request bodies: multipart, urlencoded and JSON, with limits on size, count and rate. Used by routes.

A body is received whole, into memory that counts against the budget of all bodies.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from mstar_core.api.errors import SlowUpload, UnsupportedType
from mstar_core.api.http.multipart import boundary_of, parts_of
from mstar_core.api.http.strict_json import parse_object, parse_shortened
from mstar_core.config.resolved import ApiConfig
from mstar_core.errors import RequestError, TooLarge

SKIPPED_BYTES: Final = 1 << 20
"""Limit of a body that its route ignores."""

FLOOR_WINDOW_S: Final = 30.0
FLOOR_BYTES_PER_S: Final = 16 * 1024
YIELD_BYTES: Final = 256 * 1024
KWARGS_BYTES: Final = 32 << 20
INLINE_JSON_BYTES: Final = 256 * 1024
INLINE_FORM_BYTES: Final = 32 << 20
"""Bodies up to these sizes are parsed on the event loop (a few milliseconds), larger ones on a thread.

JSON counts without its long strings, unless the whole body is over the limit of a form.
"""


class ByteStream(Protocol):
    """Source of a body; `read` returns None at the end."""

    async def read(self) -> bytes | None: ...


class BodyStream(ByteStream, Protocol):
    """A source that can also return the whole body if its length is known and it is unread."""

    async def whole_body(self, most: int) -> bytearray | None: ...


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """An uploaded file. field: of the form; name: the client's label, never a path."""

    field: str
    name: str
    content_type: str
    data: bytes


@dataclass(slots=True)
class Form:
    """Fields and files of a body, in order. fields: text, or JSON values of a JSON body."""

    fields: dict[str, Any] = field(default_factory=dict)
    files: list[UploadedFile] = field(default_factory=list)


async def read_pieces(stream: ByteStream, limit: int, *, window_s: float = FLOOR_WINDOW_S) -> AsyncIterator[bytes]:
    """Yield the body in pieces. Raises TooLarge above `limit` bytes, SlowUpload below the minimum rate."""
    loop = asyncio.get_running_loop()
    total = window = since_yield = 0
    window_end = loop.time() + window_s
    while True:
        try:
            async with asyncio.timeout_at(window_end):
                piece = await stream.read()
        except TimeoutError:
            if window < FLOOR_BYTES_PER_S * window_s:
                raise too_slow() from None
            window, window_end = 0, loop.time() + window_s
            continue
        if piece is None:
            return
        total += len(piece)
        window += len(piece)
        since_yield += len(piece)
        if total > limit:
            raise TooLarge(f"the body is larger than {limit} bytes", code="body_too_large")
        yield piece
        if since_yield >= YIELD_BYTES:
            since_yield = 0
            await asyncio.sleep(0)


def too_slow() -> SlowUpload:
    """Return the error for an upload below the minimum rate."""
    return SlowUpload("the body arrives too slowly", hint=f"send at least {FLOOR_BYTES_PER_S} bytes per second")


async def _read_whole(stream: BodyStream, limit: int) -> bytes | bytearray:
    whole = await stream.whole_body(limit)
    return whole if whole is not None else b"".join([piece async for piece in read_pieces(stream, limit)])


async def read_json(stream: BodyStream, limits: ApiConfig) -> dict[str, Any]:
    """Read a body that is one JSON object."""
    data = await _read_whole(stream, limits.max_body_bytes)
    if len(data) <= INLINE_JSON_BYTES:
        return parse_object(data)
    # A thread would wait for the interpreter of a busy loop up to 5 ms, more than a body of media takes here.
    found = parse_shortened(data, INLINE_JSON_BYTES) if len(data) <= INLINE_FORM_BYTES else None
    return await asyncio.to_thread(parse_object, data) if found is None else found


async def read_form(stream: BodyStream, content_type: str, limits: ApiConfig) -> Form:
    """Read a body of any type that /generate accepts. Raises RequestError, TooLarge, UnsupportedType, SlowUpload."""
    match content_type.partition(";")[0].strip().lower():
        case "multipart/form-data":
            boundary = boundary_of(content_type)
            data = await _read_whole(stream, limits.max_body_bytes)
            if len(data) > INLINE_FORM_BYTES:
                return await asyncio.to_thread(_multipart, data, boundary, limits)
            return _multipart(data, boundary, limits)
        case "application/x-www-form-urlencoded":
            return _urlencoded(
                await _read_whole(stream, min(limits.max_body_bytes, limits.max_text_bytes + KWARGS_BYTES)), limits
            )
        case "application/json":
            return Form(fields=await read_json(stream, limits))
        case other:
            raise UnsupportedType(
                f"the body type {other[:60]!r} is not supported" if other else "the request has no content type",
                hint="send multipart/form-data, application/x-www-form-urlencoded or application/json",
            )


def _urlencoded(data: bytes | bytearray, limits: ApiConfig) -> Form:
    form = Form()
    try:
        pairs = urllib.parse.parse_qsl(
            data.decode("ascii"), keep_blank_values=True, strict_parsing=bool(data), errors="strict", max_num_fields=256
        )
    except ValueError as error:
        raise RequestError("the urlencoded body is malformed", code="invalid_form") from error
    for name, value in pairs:
        _add_field(form, name, value, limits)
    return form


def _multipart(body: bytes | bytearray, boundary: bytes, limits: ApiConfig) -> Form:
    form = Form()
    for header, data in parts_of(body, boundary):
        name = header.name
        if header.filename is not None or name == "files":
            if len(form.files) >= limits.max_files:
                raise TooLarge(f"the request has more than {limits.max_files} files", code="too_many_files")
            form.files.append(UploadedFile(name, header.filename or "", header.content_type, bytes(data)))
            continue
        check_size(name, len(data), limits)
        try:
            _add_field(form, name, str(data, "utf-8"), limits)
        except UnicodeDecodeError as error:
            raise RequestError(f"{name[:40]} is not UTF-8", field=name[:40], code="invalid_multipart") from error
    return form


def _add_field(form: Form, name: str, value: str, limits: ApiConfig) -> None:
    if name.endswith("[]"):  # OpenAI's clients send a list as several fields
        check_size(name, len(value), limits)
        form.fields.setdefault(name, []).append(value)
        return
    if name in form.fields:
        raise RequestError(f"{name[:40]} is given more than once", hint="send it once", field=name[:40])
    check_size(name, len(value), limits)
    form.fields[name] = value


def check_size(name: str, size: int, limits: ApiConfig) -> None:
    """Raise TooLarge if a text field exceeds its limit."""
    limit = KWARGS_BYTES if name == "model_kwargs" else limits.max_text_bytes
    if size > limit:
        raise TooLarge(f"{name[:40]} is larger than {limit} bytes", field=name[:40], code="body_too_large")
