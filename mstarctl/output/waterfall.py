"""Text waterfall of one request: one row per process, node and kind, with spans over time. Pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from mstarctl.output.table import cell_width, escape
from mstarctl.output.units import counted, duration_text, size_text

MARKS: Final = {"compute": "#", "queue": "-", "wait": "_", "transfer": ":", "stall": "~"}
FREE: Final = "."
BAR_CELLS: Final = 48
NARROWEST: Final = 12
ENDS: Final = ("start_ms", "end_ms")
LEAST_PART_MS: Final = 0.5
DENSE: Final = 0.95
"""Least density of a bar that is drawn as one piece."""

ORDER: Final = ("transfer", "queue", "wait", "stall", "compute")
"""Kinds in the order in which sparse bars are drawn; only the last one covers others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One period, in milliseconds since the request's arrival. kind: compute, queue, wait, transfer or stall.

    busy_ms: time in the activity, of a period that stands for many; None: all of it.
    """

    kind: str
    start_ms: float
    end_ms: float
    busy_ms: float | None = None

    @property
    def density(self) -> float:
        """Share of the period in the activity."""
        length = self.end_ms - self.start_ms
        return 1.0 if self.busy_ms is None or length <= 0 else min(1.0, max(0.0, self.busy_ms / length))


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallRow:
    """Spans of one process, node, walk and kind. note: totals as text."""

    where: str
    what: str
    kind: str
    start_ms: float
    end_ms: float
    spans: tuple[Bar, ...]
    note: str


def waterfall(trace: Mapping[str, Any], width: int = 120) -> list[str]:
    """Draw the response of GET /v1/requests/ID/trace: a headline, the parts, then rows in order of their start."""
    rows = rows_of(trace)
    lines = [head_line(trace["request"]), *parts_lines(trace, width)]
    if trace["request"].get("placed"):
        lines.append(escape(f"placed on {trace['request']['placed']}"))
    if not rows:
        return [*lines, "no spans have been recorded yet"]
    total = max(max(row.end_ms for row in rows), float(trace["request"].get("age_s") or 0.0) * 1000, 1e-6)
    wheres, whats = max(cell_width(row.where) for row in rows), max(cell_width(row.what) for row in rows)
    digits = len(f"{total:.0f}")
    cells = max(NARROWEST, min(BAR_CELLS, width - wheres - whats - 2 * digits - 36))
    before = ""
    for row in rows:
        where = row.where if row.where != before else ""
        before = row.where
        times = f"{row.start_ms:{digits}.0f} .. {row.end_ms:{digits}.0f}"
        bar = bar_of(row, total, cells)
        lines.append(f"{where:<{wheres}}  {row.what:<{whats}}  {bar}  {times}  {row.note}".rstrip())
    if trace.get("spans_cut"):
        lines.append(f"{counted(trace['spans_cut'], 'early span')} counted in the sums only")
    return lines


def head_line(request: Mapping[str, Any]) -> str:
    """Return `r-7f3a  qwen3_omni  audio -> text   1842 ms   TTFT 231   312 tokens   5.4 s audio (RTF 0.34)`."""
    way = f"{'+'.join(request['inputs']) or '?'} -> {'+'.join(request['outputs']) or '?'}"
    parts = [escape(str(request["id"])), str(request["model"]), way, f"{float(request['age_s']) * 1000:.0f} ms"]
    if request.get("ended") is None:
        parts.append(f"still in {request.get('node') or request['state']}")
    elif request["state"] != "finished":
        parts.append(f"{request['state']}{': ' + str(request['error']) if request.get('error') else ''}")
    parts += [f"TTFT {request['ttft_ms']:.0f}"] if request.get("ttft_ms") is not None else []
    parts += [f"TTFA {request['ttfa_ms']:.0f}"] if request.get("ttfa_ms") is not None else []
    parts += [counted(request["tokens"], "token")] if request.get("tokens") else []
    if request.get("steps"):
        rate = f" ({request['step_rate']:.1f}/s)" if request.get("step_rate") else ""
        parts.append(f"step {request['step']} of {request['steps']}{rate}")
    if request.get("audio_s"):
        rtf = f" (RTF {request['rtf']:.2f})" if request.get("rtf") is not None else ""
        parts.append(f"{request['audio_s']:.1f} s audio{rtf}")
    return "   ".join(parts)


def parts_lines(trace: Mapping[str, Any], width: int) -> list[str]:
    """Return the parts of the request's time: `10.1 s = LLM 5.2 s + snac_decoder 2.1 s + queue 2.8 s`."""
    parts = trace.get("parts") or []
    if not parts:
        return []
    shown = [part for part in parts if abs(float(part["ms"])) >= LEAST_PART_MS] or parts
    text = duration_text(sum(float(part["ms"]) for part in parts) / 1000) + " ="
    for part in shown:
        sign = "-" if float(part["ms"]) < 0 else "+" if part is not shown[0] else ""
        text += f" {sign} {part['name']} {duration_text(abs(float(part['ms'])) / 1000)}".replace("  ", " ")
    return [escape(line) for line in textwrap.wrap(text, width, subsequent_indent="  ")]


def rows_of(trace: Mapping[str, Any]) -> list[WaterfallRow]:
    """Build the rows from the sums and from spans that are still open."""
    spans: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = {}
    for span in trace["spans"]:
        spans.setdefault(_place(span), []).append(span)
    sums = {_place(item): item for item in trace["sums"]}
    ttft = trace["request"].get("ttft_ms")
    busy = [span for span in trace["spans"] if span["kind"] not in ("queue", "wait", "stall")]
    rows = [_row(place, sums.get(place), spans.get(place, ()), ttft, busy) for place in {**sums, **spans}]
    return sorted(rows, key=lambda row: (row.start_ms, row.end_ms))


def _place(item: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return str(item["process"]), str(item["node"]), str(item["walk"]), str(item["kind"])


def _row(
    place: tuple[str, str, str, str],
    total: Mapping[str, Any] | None,
    spans: Sequence[Mapping[str, Any]],
    ttft_ms: float | None,
    busy: Sequence[Mapping[str, Any]],
) -> WaterfallRow:
    process, node, walk, kind = place
    known = [*([total] if total is not None else []), *spans]
    start, end = min(float(k["start_ms"]) for k in known), max(float(k["end_ms"]) for k in known)
    shown = tuple(bar_of_span(span) for span in spans)
    if total is not None and int(total["spans"]) > sum(not span["is_open"] for span in spans):
        first = min((bar.start_ms for bar in shown), default=float(total["end_ms"]))
        shown = (*shown, early_bar(total, spans, first))
    source = next((str(span["waits_for"]) for span in known if span.get("waits_for")), "")
    what = label_of(node, walk, kind, source)
    return WaterfallRow(
        where=where_of(process),
        what=escape(what.strip()),
        kind=kind,
        start_ms=start,
        end_ms=end,
        spans=shown,
        note=_note(kind, total, spans, _share(spans, busy, ttft_ms) if kind == "queue" else 0.0),
    )


def spent_ms(record: Mapping[str, Any]) -> float:
    """Return the time in the activity of a span or a sum."""
    busy = record.get("busy_ms")
    return float(record["end_ms"]) - float(record["start_ms"]) if busy is None else float(busy)


def bar_of_span(span: Mapping[str, Any], end_ms: float | None = None) -> Bar:
    """Return the bar of one span. end_ms: in place of its end, for an open one."""
    start = float(span["start_ms"])
    end = max(start, float(span["end_ms"]) if end_ms is None else end_ms)
    spent = spent_ms(span)
    return Bar(kind=str(span["kind"]), start_ms=start, end_ms=end, busy_ms=spent if spent < end - start else None)


def early_bar(total: Mapping[str, Any], spans: Sequence[Mapping[str, Any]], until_ms: float) -> Bar:
    """Return the bar of the spans in a sum that were dropped; they began before the kept ones. until_ms: its end."""
    kept = sum(spent_ms(span) for span in spans if span["kind"] == total["kind"] and not span["is_open"])
    start = float(total["start_ms"])
    busy = max(0.0, spent_ms(total) - kept)
    return Bar(kind=str(total["kind"]), start_ms=start, end_ms=max(start, until_ms), busy_ms=busy)


def label_of(node: str, walk: str, kind: str, source: str) -> str:
    """Return the label of a row: `LLM decode`, `LLM decode queue`, `snac_decoder waits for LLM`, `edge hidden`.

    source: nodes for which a wait waits.
    """
    what = " ".join(word for word in (node, walk if walk != node else "") if word)
    match kind:
        case "compute":
            return what
        case "wait":
            return f"{node} waits for {source or 'input'}"
        case "stall":
            return f"{node} stall, heard"
        case "transfer":
            return f"edge {node}"
    return f"{what} {kind}"


def where_of(process: str) -> str:
    """Return the display name of a process: `rank 1` for `worker-1`."""
    return process.replace("worker-", "rank ", 1) if process.startswith("worker-") else process


def _note(kind: str, total: Mapping[str, Any] | None, spans: Sequence[Mapping[str, Any]], share: float) -> str:
    running = [span for span in spans if span["is_open"]]
    busy = sum(spent_ms(record) for record in (*running, *([total] if total is not None else [])))
    count = sum(int(record["count"]) for record in (*running, *([total] if total is not None else [])))
    parts = [duration_text(busy / 1000)]
    if count > 1:
        unit = "items" if kind == "transfer" else "steps" if kind == "compute" else "times"
        parts.append(f"{count} {unit}, mean {busy / count:.1f} ms")
    batch = max((int(span["batch"]) for span in spans), default=0)
    if kind == "compute" and batch > 1:
        parts.append(f"batch {batch}")
    size = int(total["size_bytes"]) if total is not None else 0
    if size:
        parts.append(size_text(size))
    if share >= 0.005:
        parts.append(f"{100 * share:.0f} % of TTFT")
    if running:
        parts.append("still running")
    return "  ".join(parts)


def _share(waits: Sequence[Mapping[str, Any]], busy: Sequence[Mapping[str, Any]], ttft_ms: float | None) -> float:
    """Return the part of the time before the first output in which the request only waited here: nothing ran for it."""
    if not ttft_ms:
        return 0.0
    edges = sorted({0.0, ttft_ms, *(min(ttft_ms, float(s[end])) for s in (*waits, *busy) for end in ENDS)})
    idle = 0.0
    for start, end in pairwise(edges):
        middle = (start + end) / 2
        if _covers(waits, middle) and not _covers(busy, middle):
            idle += end - start
    return idle / ttft_ms


def _covers(spans: Sequence[Mapping[str, Any]], moment_ms: float) -> bool:
    return any(float(span["start_ms"]) <= moment_ms < float(span["end_ms"]) for span in spans)


def bar_of(row: WaterfallRow, total_ms: float, cells: int) -> str:
    """Return the row's spans as one bar of exactly `cells` cells."""
    return "".join(MARKS.get(kind, "#") if kind else FREE for kind in filled(row.spans, 0.0, total_ms, cells))


def filled(bars: Iterable[Bar], start_ms: float, span_ms: float, width: int) -> list[str]:
    """Return the kind of each cell, empty for a free one. The bar with the largest share of a cell fills it.

    Each visible bar has at least one cell, so that short steps are visible. A bar that stands for many steps fills as
    many of its cells as they took, evenly spread.
    """
    weight = [0.0] * width
    kinds = [""] * width
    bars = list(bars)
    sparse = [bar for bar in bars if bar.density < DENSE]
    for bar in bars:
        if bar.density < DENSE:
            continue
        first = (bar.start_ms - start_ms) / span_ms * width
        last = (bar.end_ms - start_ms) / span_ms * width
        if last < 0 or first > width:
            continue
        low = min(width - 1, max(0, int(first)))
        for cell in range(low, min(width - 1, max(low, int(last - 1e-9))) + 1):
            share = max(1e-6, min(last, cell + 1) - max(first, cell))
            if share > weight[cell]:
                weight[cell], kinds[cell] = share, bar.kind
    for kind in sorted({bar.kind for bar in sparse}, key=ORDER.index):
        _spread(kinds, kind, [bar for bar in sparse if bar.kind == kind], start_ms, span_ms)
    return kinds


def _spread(kinds: list[str], kind: str, bars: Sequence[Bar], start_ms: float, span_ms: float) -> None:
    """Fill cells in proportion to the time that these bars of one kind took in them."""
    width = len(kinds)
    owed = 0.5
    for cell in range(width):
        low, high = start_ms + cell / width * span_ms, start_ms + (cell + 1) / width * span_ms
        took = sum(max(0.0, min(high, bar.end_ms) - max(low, bar.start_ms)) * bar.density for bar in bars)
        owed += min(1.0, took / (high - low))
        if took and owed >= 1 and (not kinds[cell] or kind == ORDER[-1]):
            kinds[cell] = kind
            owed -= 1
    if kind not in kinds:
        first = min(bar.start_ms for bar in bars)
        if start_ms <= first <= start_ms + span_ms:
            kinds[min(width - 1, int((first - start_ms) / span_ms * width))] = kind
