"""Parser of multipart/form-data. Used by `body`. Input is untrusted: malformed input is an error."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import RequestError, TooLarge

MAX_PARTS: Final = 256
MAX_PART_HEADER_BYTES: Final = 8 * 1024
MAX_BOUNDARY: Final = 70  # RFC 2046, 5.1.1

_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PARAM: Final = re.compile(r';\s*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s]+))')


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHeader:
    """Header of a part. filename: the client's label; None for a field."""

    name: str
    filename: str | None = None
    content_type: str = ""


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


def parts_of(body: bytes | bytearray, boundary: bytes) -> Iterator[tuple[PartHeader, memoryview]]:
    """Yield the header and the data of each part, in place. Raises RequestError or TooLarge at the first error."""
    dashes = b"--" + boundary
    mark = b"\r\n" + dashes
    at = 0 if body.startswith(dashes) else body.find(mark) + 2
    if not body.startswith(dashes, at):
        raise malformed("the first boundary is missing")
    at += len(dashes)
    parts = 0
    while not body.startswith(b"--", at):  # these end the body; the epilogue is ignored
        line = body.find(b"\r\n", at)
        if line < 0 or body[at:line].strip(b" \t"):
            raise malformed("a boundary is followed by other characters")
        parts += 1
        if parts > MAX_PARTS:
            raise TooLarge(f"the body has more than {MAX_PARTS} parts", code="too_many_files")
        end = body.find(b"\r\n\r\n", line)  # the line break after the boundary may be half of an empty header
        if (len(body) if end < 0 else end) - line > MAX_PART_HEADER_BYTES:
            raise TooLarge(f"the header of a part has more than {MAX_PART_HEADER_BYTES} bytes", code="body_too_large")
        header = parse_part_header(bytes(body[line + 2 : end])) if end >= 0 else None
        after = body.find(mark, end + 2)  # of an empty part, the line break after the header belongs to the boundary
        if header is None or after < 0:
            raise malformed("the last boundary is missing")
        yield header, memoryview(body)[end + 4 : max(after, end + 4)]
        at = after + len(mark)


@functools.lru_cache(maxsize=64)
def parse_part_header(block: bytes) -> PartHeader:
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
    return PartHeader(name=params["name"], filename=filename, content_type=headers.get("content-type", ""))


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise malformed("a part header is not UTF-8") from error


def _unquote(value: str) -> str:
    return re.sub(r'\\(["\\])', r"\1", value).replace("%22", '"')
