"""Bounded look at a request body for the few fields that routing needs. The body itself is forwarded untouched."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

LOOK_BYTES: Final = 64 << 10
"""Bytes of a body that are read before it is forwarded, unless the model's name stands behind them."""

PROMPT_BYTES: Final = 4096
"""Bytes of a prompt that decide which replica has its prefix cached."""

LONGEST_FIELD: Final = 256
"""Most bytes of a field that routing reads; longer ones name nothing that exists."""

LONGEST_HEAD: Final = 4096
"""Most bytes of the headers of a part of a form."""

PROMPTS: Final = ("messages", "input", "prompt", "text")
LIMITS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")
WANTED: Final = frozenset(
    ("model", "stream", "session_id", "previous_response_id", "request_id", "voice", "session", *PROMPTS, *LIMITS)
)

_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]:,]|"', re.DOTALL)
"""A whole string, a sign of structure, or the quote of a string that is not whole. Possessive: linear in its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyFacts:
    """Fields of a body. prompt: the first bytes of its messages or text. model: None if it is absent or no string."""

    model: str | None = None
    is_streamed: bool = False
    session_id: str | None = None
    previous_response_id: str | None = None
    request_id: str | None = None
    voice: str | None = None
    max_output_tokens: int | None = None
    prompt: bytes = b""


NOTHING: Final = BodyFacts()


class _Fields(msgspec.Struct):
    """The wanted fields of a JSON object, unparsed."""

    model: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    session_id: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    request_id: msgspec.Raw = msgspec.Raw()
    voice: msgspec.Raw = msgspec.Raw()
    session: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    max_output_tokens: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()


class _Session(msgspec.Struct):
    """The wanted field of the settings of a realtime session."""

    model: str | None = None


_whole: Final = msgspec.json.Decoder(_Fields)


def facts_of(content_type: str, body: bytes, *, is_whole: bool) -> BodyFacts:
    """Return the fields of a body, or of its beginning. An unreadable body has none."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return form_facts(dict(_parts(content_type, body)))
    if kind == "application/x-www-form-urlencoded":
        return form_facts(_urlencoded(body)) if is_whole else NOTHING
    if kind == "application/sdp":
        return NOTHING
    return json_facts(_whole_fields(body) if is_whole else dict(scan(body)))


def json_facts(raw: Mapping[str, bytes]) -> BodyFacts:
    """Return the facts of unparsed JSON values by their keys."""
    limits = (_number(raw.get(name, b"")) for name in LIMITS)
    return BodyFacts(
        model=_text(raw.get("model", b"")) or _session_model(raw.get("session", b"")),
        is_streamed=raw.get("stream", b"").strip() == b"true",
        session_id=_text(raw.get("session_id", b"")),
        previous_response_id=_text(raw.get("previous_response_id", b"")),
        request_id=_text(raw.get("request_id", b"")),
        voice=_text(raw.get("voice", b"")),
        max_output_tokens=next((limit for limit in limits if limit is not None), None),
        prompt=next((bytes(raw[name][:PROMPT_BYTES]) for name in PROMPTS if raw.get(name)), b""),
    )


def form_facts(fields: Mapping[str, str]) -> BodyFacts:
    """Return the facts of the fields of a form."""
    return BodyFacts(
        model=fields.get("model") or _session_model(fields.get("session", "").encode()),
        is_streamed=fields.get("stream", "").strip().lower() in ("true", "1"),
        session_id=fields.get("session_id"),
        request_id=fields.get("request_id"),
        prompt=next((fields[name].encode()[:PROMPT_BYTES] for name in PROMPTS if fields.get(name)), b""),
    )


def _whole_fields(body: bytes) -> dict[str, bytes]:
    try:
        fields = _whole.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return {name: bytes(getattr(fields, name)) for name in _Fields.__struct_fields__}


def scan(body: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the wanted keys of the object that a piece of JSON begins, with their unparsed values.

    The value of a prompt is yielded also if it is not whole. The time is linear in the size of the piece.
    """
    depth, start, last = 0, 0, (0, 0)
    key: bytes | None = None
    for token in _TOKEN.finditer(body):
        sign = body[token.start() : token.start() + 1]
        if sign == b'"' and token.end() - token.start() == 1:
            break  # this string goes on behind the piece
        if sign in (b"{", b"["):
            depth += 1
        elif depth == 1 and sign == b":" and key is None:
            key, start = body[last[0] : last[1]], token.end()
        elif depth == 1 and sign in (b",", b"}") and key is not None:
            yield from _wanted(key, body[start : token.start()])
            key = None
        if sign in (b"}", b"]"):
            depth -= 1
            if depth <= 0:
                return
        last = token.span()
    if key is not None:
        name = _text(key)
        if name in PROMPTS:
            yield name, body[start : start + PROMPT_BYTES]


def _wanted(key: bytes, value: bytes) -> Iterator[tuple[str, bytes]]:
    name = _text(key)
    if name in WANTED and name is not None:
        yield name, value


def _text(raw: bytes) -> str | None:
    """Return a JSON string; None for other values and for one that is too long to name anything."""
    if not raw or len(raw) > LONGEST_FIELD:
        return None
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _session_model(raw: bytes) -> str | None:
    """Return the model that the settings of a realtime session name."""
    try:
        return msgspec.json.decode(raw, type=_Session).model if raw else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _number(raw: bytes) -> int | None:
    text = raw.strip()
    return int(text) if text.isdigit() and len(text) < 12 else None


def _urlencoded(body: bytes) -> dict[str, str]:
    try:
        fields = parse_qs(body.decode(), max_num_fields=1000)
    except ValueError:
        return {}
    return {name: values[0] for name, values in fields.items() if name in WANTED}


def _parts(content_type: str, body: bytes) -> Iterator[tuple[str, str]]:
    """Yield the wanted fields of a multipart form that are whole in `body`. Files are skipped."""
    boundary = parameter(content_type, "boundary")
    if not boundary:
        return
    mark = b"--" + boundary.encode("latin-1", "replace")
    pieces = (b"\r\n" + body).split(b"\r\n" + mark)
    for piece in pieces[1:-1]:  # before the first mark stands nothing, behind the last one an unfinished part
        end = piece.find(b"\r\n\r\n", 0, LONGEST_HEAD)
        if end < 0:
            continue
        disposition, value = _disposition(piece[:end]), piece[end + 4 : end + 4 + PROMPT_BYTES]
        name = parameter(disposition, "name")
        if name in WANTED and parameter(disposition, "filename") is None:
            yield (
                name,
                value[: PROMPT_BYTES if name in (*PROMPTS, "session") else LONGEST_FIELD].decode("utf-8", "replace"),
            )


def _disposition(head: bytes) -> str:
    """Return the value of Content-Disposition among the headers of a part; empty without one."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-disposition":
            return value.decode("utf-8", "replace").strip()
    return ""


def parameter(header: str, name: str) -> str | None:
    """Return a parameter of a header such as `form-data; name="model"`, None without it."""
    for part in header.split(";")[1:]:
        key, _, value = part.strip().partition("=")
        if key.strip().lower() == name:
            return _unquoted(value.strip())
    return None


def _unquoted(value: Any) -> str:
    text = str(value)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text
