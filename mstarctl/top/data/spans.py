"""Lanes of a waterfall, made from a trace of the admin socket. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from mstar_core.observe.frames import RequestStatus
from mstarctl.output.units import duration_text, size_text
from mstarctl.output.waterfall import Bar, bar_of_span, early_bar, spent_ms, where_of

KINDS: Final = ("queue", "wait", "compute", "transfer", "stall")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row of a waterfall: place (`rank 1`), label (`Thinker decode`), bars, and a note at the right."""

    place: str
    label: str
    bars: tuple[Bar, ...]
    note: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The trace of a request. why: reason for missing lanes. status: the request when the trace was read.

    parts: of its time, as in the answer of the admin socket; empty in recordings of earlier versions.
    """

    request: str
    lanes: tuple[Lane, ...] = ()
    parts: tuple[Mapping[str, Any], ...] = ()
    why: str = ""
    status: RequestStatus | None = None


def end_of(lanes: Sequence[Lane]) -> float:
    """Return the end of the last bar, at least 1 ms."""
    return max((bar.end_ms for lane in lanes for bar in lane.bars), default=1.0) or 1.0


Record = Mapping[str, Any]
Key = tuple[str, str, str]
"""(process, node, walk) of a lane. A transfer has no walk."""

MOVED: Final = "transfer"


def lanes(trace: Record, now_ms: float) -> tuple[Lane, ...]:
    """Return a lane for each process, node and walk, by start time.

    now_ms: age of the request, where open spans end. Only the newest spans of a long request are kept; one bar, made
    from the sums, stands for the earlier ones.
    """
    spans, sums = records(trace, "spans"), records(trace, "sums")
    keys = sorted({*map(_key, spans), *map(_key, sums)}, key=lambda key: (_begin(key, spans, sums), key))
    return tuple(_lane(key, _of(key, spans), _of(key, sums), now_ms) for key in keys)


def records(trace: Record, name: str) -> list[Record]:
    """Return the objects of one list of a trace."""
    items = trace.get(name)
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []


def _key(record: Record) -> Key:
    walk = "" if record.get("kind") == MOVED else str(record.get("walk") or "")
    return str(record.get("process", "")), str(record.get("node", "")), walk


def _of(key: Key, items: Sequence[Record]) -> list[Record]:
    return [record for record in items if _key(record) == key]


def _begin(key: Key, spans: Sequence[Record], sums: Sequence[Record]) -> float:
    return min(_number(record, "start_ms") for record in (*_of(key, spans), *_of(key, sums)))


def _number(record: Record, name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _lane(key: Key, spans: Sequence[Record], sums: Sequence[Record], now_ms: float) -> Lane:
    process, node, walk = key
    bars = [_known(bar_of_span(span, now_ms if span.get("is_open") else None)) for span in spans]
    for total in sums:
        same = [bar.start_ms for bar in bars if bar.kind == total.get("kind")]
        first = min(same, default=_number(total, "end_ms"))
        if first - _number(total, "start_ms") > 0.5 and (not same or len(spans) < int(_number(total, "spans"))):
            bars.append(_known(early_bar(total, spans, first)))
    label = node if not walk or walk == node else f"{node} {walk}"
    return Lane(
        place=where_of(process),
        label=label,
        bars=tuple(bars),
        note=", ".join(part for part in (note(spans, sums), _waits(spans, sums)) if part),
        node=node,
    )


def _waits(spans: Sequence[Record], sums: Sequence[Record]) -> str:
    sources = (str(record.get("waits_for") or "") for record in (*spans, *sums) if record.get("kind") == "wait")
    return next((f"waits for {source}" for source in sources if source), "")


def _known(bar: Bar) -> Bar:
    """Draw a kind of a later version as compute."""
    return bar if bar.kind in KINDS else replace(bar, kind="compute")


def note(spans: Sequence[Record], sums: Sequence[Record]) -> str:
    """Return `2.1 s, 312 steps, b14`, `2.4 MiB` or `53.0 ms`: compute, steps and batch, from the complete sums."""
    moved = [record for record in (sums or spans) if record.get("kind") == MOVED]
    if moved:
        size = sum(_number(record, "size_bytes") for record in moved)
        return size_text(size) if size else ""
    running = [span for span in spans if span.get("is_open")]
    work = [record for record in ([*sums, *running] or spans) if record.get("kind") == "compute"]
    if not work:
        return ""
    steps = max(1, int(sum(_number(record, "count") for record in work)))
    spent = sum(spent_ms(record) for record in work)
    batch = next((int(_number(span, "batch")) for span in reversed(spans) if span.get("batch")), 0)
    words = [duration_text(spent / 1000)]
    words += [f"{steps} steps"] if steps > 1 else []
    words += [f"b{batch}"] if batch > 1 else []
    return ", ".join(words)
