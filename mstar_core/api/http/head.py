"""Check of a request head by RFC 9110 and RFC 9112, before Sanic parses it. Pure functions.

A proxy in front of the api must see the same requests as the api. Whatever the RFCs let a server reject is rejected.
"""

from __future__ import annotations

import re
from typing import Final

_REQUEST_LINE: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+ [\x21-\x7e]+ HTTP/1\.([01])")
_FIELD: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
"""A field name is a token. A space before the colon, and a line that continues the one before, are invalid."""

_HOST: Final = re.compile(rb"(\[[0-9A-Fa-f:.%\w~-]*\]|[\w.~!$&'()*+,;=%-]*)(:[0-9]*)?")
_DIGITS: Final = re.compile(rb"[0-9]+")
_FRAMING: Final = re.compile(rb"(?i)\r\n(content-length|transfer-encoding):([^\r]*)")
LENGTH_DIGITS: Final = 18


class BadHead(ValueError):
    """A request head that is not valid. Its text is shown to the client. status: 400, or 413 for a huge body."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def checked_head(head: bytes) -> bytes:
    """Return a valid request head, with the framing fields spelled as Sanic needs them. Raises BadHead.

    head: without the empty line at its end. Sanic accepts neither spaces behind these values nor `Chunked`.
    """
    first, *lines = head.split(b"\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise BadHead("the request line is not valid")
    if first.startswith(b"CONNECT "):
        raise BadHead("CONNECT is not supported: this server is not a proxy")
    if first.split(b" ", 2)[1][:1] not in (b"/", b"*") and b"://" not in first:
        raise BadHead("the request target is not valid")
    hosts, lengths, codings = [], [], []
    for field_line in lines:
        field = _FIELD.fullmatch(field_line)
        if field is None:
            raise BadHead("a header line is not valid")
        name, value = field[1].lower(), field[2].rstrip(b" \t")
        if name == b"host":
            hosts.append(value)
        elif name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            codings.append(value)
    _check_host(hosts, is_required=line[1] == b"1")
    _check_body(lengths, codings, may_be_chunked=line[1] == b"1")
    return _FRAMING.sub(_plain, head) if lengths or codings else head


def _plain(field: re.Match[bytes]) -> bytes:
    return b"\r\n%b: %b" % (field[1], field[2].strip(b" \t").lower())


def _check_host(hosts: list[bytes], *, is_required: bool) -> None:
    if len(hosts) > 1 or (is_required and not hosts):
        raise BadHead("the request must have one Host header")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        raise BadHead("the Host header is not valid")


def _check_body(lengths: list[bytes], codings: list[bytes], *, may_be_chunked: bool) -> None:
    if len(lengths) + len(codings) > 1:
        raise BadHead("the request has several Content-Length or Transfer-Encoding headers")
    if codings and (codings[0].lower() != b"chunked" or not may_be_chunked):
        raise BadHead("the Transfer-Encoding is not supported; use chunked, with HTTP/1.1")
    if not lengths:
        return
    if _DIGITS.fullmatch(lengths[0]) is None:
        raise BadHead("the Content-Length is not a number")
    if len(lengths[0].lstrip(b"0")) > LENGTH_DIGITS:
        raise BadHead("the body is too large", 413)
