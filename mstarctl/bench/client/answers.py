"""Received bodies as timed chunks: lines of JSON, binary frames, server-sent events, whole bodies. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from mstarctl.bench.client.wire import Record

SPEECH_RATE: Final = 24000
"""Samples per second of PCM without a rate of its own: that of OpenAI's speech routes."""

WAV_HEAD_BYTES: Final = 44
FRAME_HEAD_BYTES: Final = 12
SAMPLE_BYTES: Final = 2
OVERLOADED: Final = (429, 503)
SENTENCE_CHARS: Final = 300
"""Characters of a server's message that are kept with each failed request."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A content chunk. at_ns: time of its last byte. amount: seconds of audio, tokens of text, or 1.

    data: its decoded bytes, empty unless asked for. size_bytes: their number. is_counted: whether the
    server counted the tokens of a text.
    """

    kind: str
    at_ns: int
    size_bytes: int
    amount: float
    data: bytes = b""
    about: dict[str, Any] = field(default_factory=dict)
    is_counted: bool = True


@dataclass(slots=True)
class Answer:
    """Decoded answer. error: empty, or a class of errors (docs/bench.md). code: the server's own. detail: why."""

    chunks: list[Chunk] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    detail: str = ""
    code: str = ""
    is_done: bool = False


class _Line(msgspec.Struct):
    """One line of `/generate`. data: JSON text of a base64 string."""

    modality: str
    data: msgspec.Raw = msgspec.Raw(b'""')
    metadata: dict[str, Any] = {}


_LINES: Final = msgspec.json.Decoder(_Line)


def decode(record: Record, *, keeps_data: bool) -> Answer:
    """Decode the answer of a record. keeps_data: also decode contents, for checks.

    A body that cannot be parsed is a `stream` error.
    """
    answer = Answer()
    if record.error in ("transport", "timeout", "incomplete", "cancelled", "skipped"):
        answer.error, answer.detail = record.error, record.detail
    elif record.status != 200:
        answer.error = "refused" if record.status in OVERLOADED else "http"
        answer.code, sentence = _error_of(record.body)
        reason = ": ".join(part for part in (answer.code, sentence) if part)
        answer.detail = f"{record.status} {reason or record.body[:SENTENCE_CHARS].decode('utf-8', 'replace')}".rstrip()
        return answer
    if record.status == 200:
        try:
            _read(record, answer, keeps_data=keeps_data)
        except (ValueError, KeyError, TypeError, IndexError, msgspec.MsgspecError, binascii.Error) as error:
            answer.error = answer.error or "stream"
            answer.detail = answer.detail or f"invalid answer: {error}"
    if not answer.error and not answer.is_done:
        answer.error, answer.detail = "stream", "the answer ended before its last line"
    return answer


def _read(record: Record, answer: Answer, *, keeps_data: bool) -> None:
    kind = record.content_type.partition(";")[0]
    match kind:
        case "application/x-mstar-frames":
            _read_frames(record, answer, keeps_data=keeps_data)
        case "text/event-stream":
            _read_events(record, answer, keeps_data=keeps_data)
        case "application/json":
            _read_whole(record, answer, keeps_data=keeps_data)
        case _ if kind.startswith("audio/"):
            _read_sound(record, answer, keeps_data=keeps_data)
        case _:
            _read_lines(record, answer, keeps_data=keeps_data)


def _time_of(marks: Sequence[tuple[int, int]], end: int) -> int:
    """Return the time of the read that brought byte `end - 1`."""
    at = bisect_left(marks, end, key=lambda mark: mark[0])
    return marks[min(at, len(marks) - 1)][1]


def _lines(record: Record) -> Iterator[tuple[bytes, int]]:
    """Yield the lines with their times, split at newlines only."""
    at = 0
    while (end := record.body.find(b"\n", at)) >= 0:
        yield record.body[at:end], _time_of(record.marks, end + 1)
        at = end + 1
    if at < len(record.body) and not record.error:
        yield record.body[at:], record.marks[-1][1]


def _read_lines(record: Record, answer: Answer, *, keeps_data: bool) -> None:
    for text, at_ns in _lines(record):
        if not text.strip():
            continue
        line = _LINES.decode(text)
        match line.modality:
            case "start" | "progress":
                continue
            case "done":
                answer.is_done = True
                answer.usage = line.metadata.get("usage") or {}
            case "error":
                data = base64.b64decode(bytes(line.data)[1:-1], validate=True)
                _fail(answer, str(line.metadata.get("code", "error")), data.decode("utf-8", "replace"))
                return
            case modality:
                size = _base64_bytes(bytes(line.data))
                data = base64.b64decode(bytes(line.data)[1:-1]) if keeps_data and size else b""
                _add(answer, modality, at_ns, size, data, line.metadata)
    # Servers without a `done` line end their stream with the body.
    answer.is_done = answer.is_done or (bool(answer.chunks) and not _is_ours(record.body))


def _is_ours(body: bytes) -> bool:
    return body.startswith((b'{"modality":"start"', b'{"modality": "start"'))


def _base64_bytes(text: bytes) -> int:
    return max(0, (len(text) - 2) // 4 * 3 - text[-3:-1].count(b"="))


def _add(answer: Answer, modality: str, at_ns: int, size: int, data: bytes, about: dict[str, Any]) -> None:
    """Add a chunk if it has content."""
    if not size:
        return
    amount = 1.0
    if modality == "audio":
        amount = size / (int(about.get("sample_rate", SPEECH_RATE)) * int(about.get("num_channels", 1)) * SAMPLE_BYTES)
    elif modality == "text":
        amount = float(about.get("n_tokens", 1))
    kept: dict[str, Any] = {name: about[name] for name in ("shape", "dtype", "name", "sample_rate") if name in about}
    is_counted = modality != "text" or "n_tokens" in about
    answer.chunks.append(Chunk(modality, at_ns, size, amount, data, kept, is_counted))


def _read_frames(record: Record, answer: Answer, *, keeps_data: bool) -> None:
    body, at = record.body, 0
    while len(body) - at >= FRAME_HEAD_BYTES:
        head, payload = int.from_bytes(body[at : at + 4], "little"), int.from_bytes(body[at + 4 : at + 12], "little")
        start = at + FRAME_HEAD_BYTES + head
        end = start + payload
        if len(body) < end:
            return
        told = json.loads(body[at + FRAME_HEAD_BYTES : start])
        about = told.get("metadata") or {}
        match told["modality"]:
            case "start" | "progress":
                pass
            case "done":
                answer.is_done, answer.usage = True, about.get("usage") or {}
            case "error":
                _fail(answer, str(about.get("code", "error")), body[start:end].decode("utf-8", "replace"))
                return
            case modality:
                _add(
                    answer,
                    modality,
                    _time_of(record.marks, end),
                    payload,
                    body[start:end] if keeps_data else b"",
                    about,
                )
        at = end


def _read_events(record: Record, answer: Answer, *, keeps_data: bool) -> None:
    for text, at_ns in _lines(record):
        if not text.startswith(b"data:"):
            continue
        text = text[5:].strip()
        if text == b"[DONE]":
            answer.is_done = True
            continue
        event = json.loads(text)
        if "error" in event:
            _fail(answer, *_error_facts(event))
            return
        answer.usage = event.get("usage") or answer.usage
        if event.get("type") == "speech.audio.delta":
            _add_text64(answer, "audio", at_ns, event["audio"], keeps_data=keeps_data)
        answer.is_done = answer.is_done or event.get("type") == "speech.audio.done"
        for choice in event.get("choices", ()):
            _add_delta(answer, at_ns, choice.get("delta") or {}, keeps_data=keeps_data)


def _add_delta(answer: Answer, at_ns: int, delta: dict[str, Any], *, keeps_data: bool) -> None:
    content = delta.get("content")
    if isinstance(content, str) and content:
        data = content.encode()
        _add(answer, "text", at_ns, len(data), data if keeps_data else b"", {})
    sound = delta.get("audio") or {}
    if sound.get("data"):
        _add_text64(answer, "audio", at_ns, sound["data"], keeps_data=keeps_data)


def _add_text64(answer: Answer, kind: str, at_ns: int, text: str, *, keeps_data: bool) -> None:
    size = _base64_bytes(b'"' + text.encode() + b'"')
    _add(answer, kind, at_ns, size, base64.b64decode(text) if keeps_data else b"", {})


def _read_whole(record: Record, answer: Answer, *, keeps_data: bool) -> None:
    """Read an answer that came as one document: images of the OpenAI routes, or `/generate` without streaming."""
    body = json.loads(record.body)
    at_ns = record.marks[-1][1]
    answer.usage = body.get("usage") or {}
    for item in body.get("data", ()) if isinstance(body.get("data"), list) else ():
        if item.get("b64_json"):
            _add_text64(answer, "image", at_ns, item["b64_json"], keeps_data=keeps_data)
    for choice in body.get("choices", ()):
        _add_delta(answer, at_ns, choice.get("message") or {}, keeps_data=keeps_data)
    for modality, items in (body.get("outputs") or {}).items():
        for item in items:
            about = item.get("metadata") or {}
            data = base64.b64decode(item["data"])
            _add(answer, modality, at_ns, len(data), data if keeps_data else b"", about)
    answer.is_done = True


def _read_sound(record: Record, answer: Answer, *, keeps_data: bool) -> None:
    """Read raw PCM, or a WAV without its header. Each read is a chunk."""
    start = WAV_HEAD_BYTES if record.body.startswith(b"RIFF") else 0
    rate = int.from_bytes(record.body[24:28], "little") if start else SPEECH_RATE
    before = start
    for end, at_ns in record.marks:
        if end > before:
            data = record.body[before:end] if keeps_data else b""
            _add(answer, "audio", at_ns, end - before, data, {"sample_rate": rate})
            before = end
    answer.is_done = not record.error


def _fail(answer: Answer, code: str, sentence: str) -> None:
    """End an answer by an error line of its stream."""
    answer.error, answer.code = "stream", code
    answer.detail = ": ".join(part for part in (code, sentence[:SENTENCE_CHARS]) if part) or "error"


def _error_of(body: bytes) -> tuple[str, str]:
    """Return the code and the sentence of an error body, each empty if it has none."""
    try:
        return _error_facts(json.loads(body))
    except (ValueError, TypeError):
        return "", ""


def _error_facts(body: Any) -> tuple[str, str]:
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, str):  # some servers answer {"error": "sentence"}
        return "", error[:SENTENCE_CHARS]
    if not isinstance(error, dict):
        return "", ""
    return str(error.get("code") or "")[:SENTENCE_CHARS], str(error.get("message") or "")[:SENTENCE_CHARS]
