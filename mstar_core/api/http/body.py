"""Request bodies: multipart, urlencoded and JSON, streamed, with limits on size, count and rate. Used by routes."""

from __future__ import annotations

import asyncio
import os
import tempfile
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Protocol

from mstar_core.api.errors import SlowUpload, UnsupportedType, storage_full
from mstar_core.api.http.multipart import ROOM, Event, MultipartParser, PartBegin, PartData, PartEnd, boundary_of
from mstar_core.api.http.strict_json import parse_object
from mstar_core.errors import RequestError, TooLarge

SPOOL_BYTES: Final = 1 << 20
"""Larger uploads are spooled to a file."""

WHOLE_BYTES: Final = 32 << 20
"""Forms up to this size are received into one buffer, and their files stay in memory. A clip of 64 frames has 12.6 MB,
and spooling it would only read it again. Larger forms are parsed as they arrive.
"""

SKIPPED_BYTES: Final = 1 << 20
"""Limit of a body that its route ignores."""

FLOOR_WINDOW_S: Final = 30.0
FLOOR_BYTES_PER_S: Final = 16 * 1024
YIELD_BYTES: Final = 256 * 1024
KWARGS_BYTES: Final = 32 << 20
INLINE_JSON_BYTES: Final = 256 * 1024
"""JSON up to this size is parsed on the event loop (a few milliseconds), larger JSON on a thread."""


class ByteStream(Protocol):
    """Source of a body; `read` returns None at the end."""

    async def read(self) -> bytes | None: ...


class BodyStream(ByteStream, Protocol):
    """A source that can also return the whole body, behind `room` reserved bytes, if it is small and unread."""

    async def whole_body(self, most: int, room: int) -> bytearray | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Limits of a body. text, body: bytes; files: count."""

    body: int
    text: int
    files: int


class UploadedFile:
    """An uploaded file: in memory while small, then in an unnamed temporary file. Owned by `UploadedFiles`.

    name: the client's label, never a path.
    """

    def __init__(self, name: str, content_type: str, folder: Path, most_in_memory: int = SPOOL_BYTES) -> None:
        self._most_in_memory = most_in_memory
        self.name = name
        self.content_type = content_type
        self.size = 0
        self._folder = folder
        self._pieces: list[bytes] = []
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> None:
        """Append bytes. Raises Unavailable (`storage_full`) if the disk is full."""
        self.size += len(data)
        if self.size <= self._most_in_memory:
            self._pieces.append(data)
            return
        try:
            if self._file is None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=str(self._folder))
                self._file.writelines(self._pieces)
                self._pieces.clear()
            self._file.write(data)
        except OSError as error:
            raise storage_full(error) from error

    def finish(self) -> None:
        """Flush the file. Raises like `write`."""
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            raise storage_full(error) from error

    @property
    def is_in_memory(self) -> bool:
        """Return whether the upload was never written to a file."""
        return self._file is None

    def head(self, size: int = 64) -> bytes:
        """Return the first bytes."""
        if self._file is None:
            return self.read()[:size]
        self._file.seek(0)
        return self._file.read(size)

    def read(self) -> bytes:
        """Return all bytes. Reads the disk unless the upload is in memory; then call it on a thread."""
        if self._file is None:
            if len(self._pieces) != 1:
                self._pieces = [b"".join(self._pieces)]
            return self._pieces[0]
        self._file.seek(0)
        return self._file.read()

    def close(self) -> None:
        """Free the upload. Safe to call twice."""
        self._pieces.clear()
        if self._file is not None:
            with suppress(OSError):  # on a full disk, closing retries to write the buffer
                self._file.close()


@dataclass(slots=True)
class Form:
    """Fields and files of a body, in order. fields: text, or JSON values of a JSON body."""

    fields: dict[str, Any] = field(default_factory=dict)
    files: list[tuple[str, UploadedFile]] = field(default_factory=list)


class UploadedFiles:
    """Uploads of one request. Freed by `close`.

    most_in_memory: size limit of uploads kept in memory; larger if the whole body is in memory anyway.
    """

    def __init__(self, folder: Path) -> None:
        self.most_in_memory = SPOOL_BYTES
        self._folder = folder
        self._open: list[UploadedFile] = []

    def new(self, name: str, content_type: str) -> UploadedFile:
        """Create an empty upload."""
        upload = UploadedFile(name, content_type, self._folder, self.most_in_memory)
        self._open.append(upload)
        return upload

    def close(self) -> None:
        """Free all uploads. Safe to call twice."""
        for upload in self._open:
            upload.close()
        self._open.clear()


@contextmanager
def uploads_in(folder: Path) -> Iterator[UploadedFiles]:
    """Provide uploads that are freed at the end of the block."""
    uploads = UploadedFiles(folder)
    try:
        yield uploads
    finally:
        uploads.close()


def sweep(folder: Path) -> None:
    """Delete uploads left behind by an earlier process."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    for entry in folder.iterdir():
        if not entry.is_dir():
            entry.unlink(missing_ok=True)


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


async def read_json(stream: ByteStream, limits: BodyLimits) -> dict[str, Any]:
    """Read a body that is one JSON object."""
    data = b"".join([piece async for piece in read_pieces(stream, limits.body)])
    if len(data) > INLINE_JSON_BYTES:
        return await asyncio.to_thread(parse_object, data)
    return parse_object(data)


async def read_form(stream: BodyStream, content_type: str, limits: BodyLimits, uploads: UploadedFiles) -> Form:
    """Read a body of any type that /generate accepts. Raises RequestError, TooLarge, UnsupportedType, SlowUpload."""
    match content_type.partition(";")[0].strip().lower():
        case "multipart/form-data":
            return await _multipart(stream, content_type, limits, uploads)
        case "application/x-www-form-urlencoded":
            return await _urlencoded(stream, limits)
        case "application/json":
            return Form(fields=await read_json(stream, limits))
        case other:
            raise UnsupportedType(
                f"the body type {other[:60]!r} is not supported" if other else "the request has no content type",
                hint="send multipart/form-data, application/x-www-form-urlencoded or application/json",
            )


async def _urlencoded(stream: ByteStream, limits: BodyLimits) -> Form:
    data = b"".join([piece async for piece in read_pieces(stream, min(limits.body, limits.text + KWARGS_BYTES))])
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


async def _multipart(stream: BodyStream, content_type: str, limits: BodyLimits, uploads: UploadedFiles) -> Form:
    parser = MultipartParser(boundary_of(content_type))
    form = Form()
    part = _PartReader(form, limits, uploads)
    whole = await stream.whole_body(WHOLE_BYTES, ROOM)
    if whole is not None:
        uploads.most_in_memory = WHOLE_BYTES
        part.take(parser.feed_whole(whole))
    else:
        async for piece in read_pieces(stream, limits.body):
            part.take(parser.feed(piece))
    parser.finish()
    return form


class _PartReader:
    """Collects the current part of a form: a field or an upload."""

    def __init__(self, form: Form, limits: BodyLimits, uploads: UploadedFiles) -> None:
        self._form, self._limits, self._uploads = form, limits, uploads
        self._name = ""
        self._text: bytearray | None = None
        self._upload: UploadedFile | None = None

    def take(self, events: Iterator[Event]) -> None:
        for event in events:
            match event:
                case PartBegin():
                    self.begin(event)
                case PartData(data):
                    self.data(data)
                case PartEnd():
                    self.end()

    def begin(self, begin: PartBegin) -> None:
        self._name = begin.name
        is_file = begin.filename is not None or begin.name == "files"
        self._text = None if is_file else bytearray()
        self._upload = None
        if is_file:
            if len(self._form.files) >= self._limits.files:
                raise TooLarge(f"the request has more than {self._limits.files} files", code="too_many_files")
            self._upload = self._uploads.new(begin.filename or "", begin.content_type)

    def data(self, data: bytes) -> None:
        if self._upload is not None:
            self._upload.write(data)
        elif self._text is not None:
            self._text += data
            check_size(self._name, len(self._text), self._limits)

    def end(self) -> None:
        if self._upload is not None:
            self._upload.finish()
            self._form.files.append((self._name, self._upload))
        elif self._text is not None:
            try:
                _add_field(self._form, self._name, self._text.decode(), self._limits)
            except UnicodeDecodeError as error:
                raise RequestError(
                    f"{self._name[:40]} is not UTF-8", field=self._name[:40], code="invalid_multipart"
                ) from error


def _add_field(form: Form, name: str, value: str, limits: BodyLimits) -> None:
    if name in form.fields:
        raise RequestError(f"{name[:40]} is given more than once", hint="send it once", field=name[:40])
    check_size(name, len(value), limits)
    form.fields[name] = value


def check_size(name: str, size: int, limits: BodyLimits) -> None:
    """Raise TooLarge if a text field exceeds its limit."""
    limit = KWARGS_BYTES if name == "model_kwargs" else limits.text
    if size > limit:
        raise TooLarge(f"{name[:40]} is larger than {limit} bytes", field=name[:40], code="body_too_large")
