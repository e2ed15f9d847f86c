"""Outcome of one request: its times, chunks, usage and checks. One line of `requests.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from mstarctl.bench.client.answers import Chunk, decode
from mstarctl.bench.client.wire import Record
from mstarctl.bench.measure.tokens import TokenCounter

OK: Final = "ok"
ERRORS: Final = ("refused", "http", "stream", "transport", "invalid", "timeout")
"""Classes of errors. `incomplete`, `cancelled` and `skipped` do not count as errors of the server."""

EXPECTED: Final = ("used", "dt_s", "frames", "plan")
USAGE: Final = ("prompt_tokens", "completion_tokens", "audio_seconds", "steps", "queue_ms", "ttft_ms", "total_ms")


class ReceivedChunk(msgspec.Struct, frozen=True, array_like=True):
    """A content chunk. at_s: since the start of the phase. amount: seconds of audio, tokens of text, or 1.

    name: of a tensor; each step of a rollout has one chunk of each name.
    """

    kind: str
    at_s: float
    size_bytes: int
    amount: float
    name: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Times in seconds since the start of its phase. status: `ok` or a class of `ERRORS`.

    is_late: its time t0 is the intended one (open loads, traces, control loops), not the sent one.
    flaw: why its output is invalid. requested: output modalities. is_approximate: the tokens of its text
    are not counted, so each chunk stands for one.
    """

    index: int
    phase: int
    client: int
    id: str
    due_s: float
    sent_s: float
    headers_s: float
    end_s: float
    status: str
    http_status: int
    detail: str = ""
    flaw: str = ""
    is_reused: bool = False
    size_bytes: int = 0
    reads: int = 0
    requested: tuple[str, ...] = ()
    chunks: tuple[ReceivedChunk, ...] = ()
    usage: dict[str, float] = {}
    expected: dict[str, Any] = {}
    is_approximate: bool = False

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    def of_kind(self, kind: str) -> list[ReceivedChunk]:
        """Return the chunks of one modality, in order."""
        return [chunk for chunk in self.chunks if chunk.kind == kind]


def outcome_of(
    record: Record,
    asked: Mapping[str, Any],
    start_ns: int,
    prefix: str,
    warm_up: int,
    *,
    is_checked: bool,
    count_tokens: TokenCounter | None = None,
) -> Outcome:
    """Decode one record. is_checked: also check its output. count_tokens: for texts that the server did not count."""
    answer = decode(record, keeps_data=is_checked or count_tokens is not None)
    uncounted = not answer.usage.get("completion_tokens") and any(not chunk.is_counted for chunk in answer.chunks)

    def amount(chunk: Chunk) -> float:
        if chunk.is_counted or count_tokens is None:
            return round(chunk.amount, 6)
        return float(count_tokens(chunk.data.decode("utf-8", "ignore")))

    status = answer.error or OK
    flaw = ""
    if is_checked and status == OK:
        from mstarctl.bench.client.checks import flaw as flaw_of  # here, because numpy is slow to import

        flaw = flaw_of(answer, asked["outputs"], asked["expected"])
        status = "invalid" if flaw else OK
    number = record.index - warm_up

    def since(at_ns: int) -> float:
        return round((at_ns - start_ns) / 1e9, 6) if at_ns else -1.0

    return Outcome(
        index=number,
        phase=record.phase,
        client=record.client,
        id=f"{prefix}w{record.index}" if number < 0 else f"{prefix}{number}",
        due_s=since(record.due_ns),
        sent_s=since(record.sent_ns),
        headers_s=since(record.headers_ns),
        end_s=since(record.end_ns),
        status=status,
        http_status=record.status,
        detail=answer.detail,
        flaw=flaw,
        is_reused=record.is_reused,
        size_bytes=len(record.body),
        reads=len(record.marks),
        requested=tuple(asked["outputs"]),
        chunks=tuple(
            ReceivedChunk(c.kind, since(c.at_ns), c.size_bytes, amount(c), str(c.about.get("name", "")))
            for c in answer.chunks
        ),
        usage={name: float(answer.usage[name]) for name in USAGE if isinstance(answer.usage.get(name), int | float)},
        expected={name: value for name, value in asked["expected"].items() if name in EXPECTED},
        is_approximate=uncounted and count_tokens is None,
    )
