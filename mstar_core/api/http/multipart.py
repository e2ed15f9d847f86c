"""Incremental parser of multipart/form-data: bytes in, events out. Used by `body`.

Input is untrusted: limits are checked before data is kept, and malformed input is an error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import RequestError, TooLarge

MAX_PARTS: Final = 256
MAX_PART_HEADER_BYTES: Final = 8 * 1024
FIRST: Final = b"\r\n"
"""Prepended to the body, so that the first boundary looks like the others."""

ROOM: Final = len(FIRST)
MAX_BOUNDARY: Final = 70  # RFC 2046, 5.1.1

_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PARAM: Final = re.compile(r';\s*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s]+))')


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBegin:
    """Start of a part. filename: the client's label; None for a field."""

    name: str
    filename: str | None = None
    content_type: str = ""


@dataclass(frozen=True, slots=True)
class PartData:
    """Data of the current part."""

    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnd:
    """End of the current part."""


Event = PartBegin | PartData | PartEnd


def malformed(why: str) -> RequestError:
    """Return the error for a malformed body."""
    return RequestError(f"the multipart body is malformed: {why}", code="invalid_multipart")


def boundary_of(content_type: str) -> bytes:
    """Return the boundary of a content type. Raises RequestError if there is none."""
    for name, quoted, plain in _PARAM.findall(content_type):
        if name.lower() == "boundary":
            value = _unquote(quoted) if quoted else plain
            if 1 <= len(value) <= MAX_BOUNDARY and value.isascii() and value.isprintable() and not value.endswith(" "):
                return bytes(value, "ascii")
            break
    raise malformed("the content type has no valid boundary")


class MultipartParser:
    """Parser state: `feed` yields events, `finish` checks that the body was complete."""

    def __init__(self, boundary: bytes) -> None:
        self._mark = b"\r\n--" + boundary
        self._buffer = bytearray(FIRST)
        self._at = 0  # start of unparsed data; deleting the front for each event would move the rest
        self._state = "preamble"
        self._parts = 0
        self._is_first = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """Parse some bytes. Raises RequestError or TooLarge at the first invalid byte."""
        del self._buffer[: self._at]
        self._at = 0
        self._buffer += data
        moved = True
        while moved:
            match self._state:
                case "preamble":
                    moved = self._preamble()
                case "boundary":
                    moved = self._boundary()
                case "header":
                    event = self._header()
                    moved = event is not None
                    if event is not None:
                        yield event
                case "data":
                    moved = yield from self._data()
                case _:
                    self._at = len(self._buffer)  # the epilogue is ignored
                    moved = False

    def feed_whole(self, body: bytearray) -> Iterator[Event]:
        """Parse a whole body in place. Its first `ROOM` bytes are reserved. Raises like `feed`."""
        body[:ROOM] = FIRST
        self._buffer = body
        return self.feed(b"")

    def finish(self) -> None:
        """Raise RequestError if the last boundary is missing."""
        if self._state != "done":
            raise malformed("the last boundary is missing")

    def _preamble(self) -> bool:
        at = self._buffer.find(self._mark, self._at)
        if at < 0:
            if self._left > MAX_PART_HEADER_BYTES:
                raise malformed("the first boundary is missing")
            return False
        self._at = at + len(self._mark)
        self._state = "boundary"
        return True

    @property
    def _left(self) -> int:
        return len(self._buffer) - self._at

    def _boundary(self) -> bool:
        # After a boundary, "--" ends the body; whitespace and a line break start a part.
        if self._buffer.startswith(b"--", self._at):
            self._state = "done"
            return True
        end = self._buffer.find(b"\r\n", self._at)
        if end < 0:
            if self._left > MAX_PART_HEADER_BYTES:
                raise malformed("a boundary line has no end")
            if self._left >= 2 and self._buffer[self._at :].rstrip(b" \t\r"):
                raise malformed("a boundary is followed by other characters")
            return False
        if self._buffer[self._at : end].strip(b" \t"):
            raise malformed("a boundary is followed by other characters")
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise TooLarge(f"the body has more than {MAX_PARTS} parts", code="too_many_files")
        self._at = end  # the line break is kept: it may be half of an empty header
        self._state = "header"
        return True

    def _header(self) -> PartBegin | None:
        end = self._buffer.find(b"\r\n\r\n", self._at)
        if (self._left if end < 0 else end - self._at) > MAX_PART_HEADER_BYTES:
            raise TooLarge(f"the header of a part has more than {MAX_PART_HEADER_BYTES} bytes", code="body_too_large")
        if end < 0:
            return None
        begin = parse_part_header(bytes(self._buffer[self._at + 2 : end]))
        self._at = end + 2  # one line break is kept: the boundary of an empty part follows it directly
        self._state = "data"
        self._is_first = True
        return begin

    def _data(self) -> Generator[Event, None, bool]:
        if self._is_first:
            if not self._starts_part():
                return False
            self._is_first = False
        at = self._buffer.find(self._mark, self._at)
        if at >= 0:
            if at > self._at:
                yield PartData(self._until(at))
            self._at = at + len(self._mark)
            self._state = "boundary"
            yield PartEnd()
            return True
        end = len(self._buffer) - len(self._mark) + 1  # the following bytes may be the start of a boundary
        if end > self._at:
            yield PartData(self._until(end))
            self._at = end
        return False

    def _until(self, end: int) -> bytes:
        with memoryview(self._buffer) as view:  # slicing a bytearray would copy once more
            return bytes(view[self._at : end])

    def _starts_part(self) -> bool:
        # The line break after the headers belongs to the boundary only if the part is empty.
        if self._left < len(self._mark) and self._mark.startswith(self._buffer[self._at :]):
            return False
        if not self._buffer.startswith(self._mark, self._at):
            self._at += 2
        return True


@functools.lru_cache(maxsize=64)
def parse_part_header(block: bytes) -> PartBegin:
    """Parse the headers of a part. Raises RequestError if the name is missing.

    Results are cached, because clients repeat the same headers.
    """
    headers: dict[str, str] = {}
    for line in block.split(b"\r\n") if block else ():
        name, colon, value = line.partition(b":")
        if not colon or _TOKEN.fullmatch(name) is None:
            raise malformed("a part has an invalid header line")
        if name.lower().decode() in headers:
            raise malformed("a part has a duplicate header")
        headers[name.lower().decode()] = _text(value).strip()
    disposition = headers.get("content-disposition", "")
    params: dict[str, str] = {}
    for name, quoted, plain in _PARAM.findall(disposition):
        if name.lower() in params:
            raise malformed("a part has a duplicate parameter")
        params[name.lower()] = _unquote(quoted) if quoted or not plain else plain
    if disposition.partition(";")[0].strip().lower() != "form-data" or "name" not in params:
        raise malformed("a part has no name")
    if headers.get("content-transfer-encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
        raise malformed("a part has a transfer encoding, which is not supported")
    filename = params.get("filename")
    if filename is None and "filename*" in params:
        filename = params["filename*"].rpartition("'")[2]
    return PartBegin(name=params["name"], filename=filename, content_type=headers.get("content-type", ""))


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise malformed("a part header is not UTF-8") from error


def _unquote(value: str) -> str:
    return re.sub(r'\\(["\\])', r"\1", value).replace("%22", '"')
