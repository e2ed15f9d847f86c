"""Waterfall of a request: a row per lane, with cells for queue, wait, compute, transfer and stall."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from mstar_core.observe.frames import RequestStatus
from mstarctl.output.line import Line, clip, fit, left, line, pair, safe, take
from mstarctl.output.waterfall import Bar, filled, parts_lines
from mstarctl.top.data.spans import KINDS, Lane, Trace, end_of
from mstarctl.top.data.view import View
from mstarctl.top.drawing import numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Zoom:
    """The visible time range. span_ms: None shows everything."""

    start_ms: float = 0.0
    span_ms: float | None = None

    def closer(self, end_ms: float, factor: float) -> Zoom:
        """Zoom around the middle, between 1 ms and everything."""
        span = self.span_ms if self.span_ms is not None else end_ms
        new_span = max(1.0, span / factor)
        if new_span >= end_ms:
            return Zoom()
        middle = self.start_ms + span / 2
        return Zoom(start_ms=min(max(0.0, middle - new_span / 2), max(0.0, end_ms - new_span)), span_ms=new_span)

    def moved(self, end_ms: float, share: float) -> Zoom:
        """Pan by a share of the visible range."""
        if self.span_ms is None:
            return self
        start = self.start_ms + share * self.span_ms
        return Zoom(start_ms=min(max(0.0, start), max(0.0, end_ms - self.span_ms)), span_ms=self.span_ms)


Marks = Sequence[tuple[float, str]]
"""(ms since the request's arrival, name) of moments to mark."""


def waterfall(view: View, lanes: Sequence[Lane], width: int, zoom: Zoom | None = None, marks: Marks = ()) -> list[Line]:
    """Draw a scale, the marks and one line per lane. Each bar has at least one cell, so that short steps are visible.

    marks: named below the scale, and drawn through the free cells of the lanes.
    """
    zoom = zoom or Zoom()
    place_w, label_w, note_w = _columns(lanes, width)
    room = max(8, width - place_w - label_w - note_w - 3)
    start = zoom.start_ms
    span = zoom.span_ms if zoom.span_ms is not None else end_of(lanes)
    margin = " " * (place_w + label_w + 2)
    rows = [line(margin, (scale(start, span, room), "dim"))]
    seen = [(at, name) for at, name in marks if start <= at <= start + span]
    if seen:
        rows.append(line(margin, (mark_names(view, seen, start, span, room), "accent")))
    columns = frozenset(_column(at, start, span, room) for at, _ in seen)
    for lane in lanes:
        role = view.node_role(lane.node) if lane.node else ""
        rows.append(
            line(" ", (left(safe(lane.place), place_w), "dim"), (left(safe(lane.label), label_w), role), " ")
            + cells(view, lane.bars, start, span, room, columns)
            + line(" ", (clip(safe(lane.note), max(0, note_w)), "dim"))
        )
    return [fit(row, width) for row in rows]


def marks_of(r: RequestStatus) -> Marks:
    """Return the first output of a request, and its first audio if that came later."""
    marks = [] if r.ttft_ms is None else [(r.ttft_ms, "TTFT")]
    if r.ttfa_ms is not None and r.ttfa_ms != r.ttft_ms:
        marks.append((r.ttfa_ms, "TTFA"))
    return marks


def mark_names(view: View, marks: Marks, start_ms: float, span_ms: float, width: int) -> str:
    """Draw `↓TTFT 197 ms` below the scale, at the left of its column if there is no room; exactly `width` cells.

    A name without room at both sides is left out; the title of the request has it.
    """
    text = [" "] * width
    columns = [_column(at, start_ms, span_ms, width) for at, _ in sorted(marks)]
    for column in columns:
        text[column] = view.glyphs.down
    for (at, name), column in zip(sorted(marks), columns, strict=True):
        label = f"{name} {at:.0f} ms"
        for begin in (column + 1, column - len(label)):
            around = text[max(0, begin - 1) : begin] if begin <= column else text[begin + len(label) :][:1]
            if 0 <= begin <= width - len(label) and not "".join([*text[begin : begin + len(label)], *around]).strip():
                text[begin : begin + len(label)] = label
                break
    return "".join(text)


def _column(at_ms: float, start_ms: float, span_ms: float, width: int) -> int:
    return min(width - 1, max(0, int((at_ms - start_ms) / span_ms * width)))


def _columns(lanes: Sequence[Lane], width: int) -> tuple[int, int, int]:
    place = max((len(lane.place) for lane in lanes), default=4) + 2
    label = max((len(lane.label) for lane in lanes), default=4)
    note = max((len(lane.note) for lane in lanes), default=0)
    if width < 70:
        return min(place, 7), min(label, 13), 0
    return min(place, 12), min(label, 28), min(note, 3 * width // 10)


def scale(start_ms: float, span_ms: float, width: int) -> str:
    """Draw the times above the bars at round intervals, the first with its unit; exactly `width` cells."""
    step = _step(span_ms, width)
    text = [" "] * width
    tick = step * -(-start_ms // step)
    free = 0
    while tick <= start_ms + span_ms:
        label = _tick(tick, step, has_unit=not free)
        at = round((tick - start_ms) / span_ms * width)
        if at >= free and at + len(label) <= width:
            text[at : at + len(label)] = label
            free = at + len(label) + 1
        tick += step
    return "".join(text)


def _step(span_ms: float, width: int) -> float:
    least = span_ms * 9 / max(1, width)
    scale_ = 1.0
    while True:
        for factor in (1, 2, 5):
            if factor * scale_ / 10 >= least:
                return factor * scale_ / 10
        scale_ *= 10


def _tick(value: float, step: float, *, has_unit: bool) -> str:
    if step >= 1000:
        return f"{value / 1000:g} s" if has_unit else f"{value / 1000:g}"
    return (f"{value:.1f}" if step < 1 else f"{value:.0f}") + (" ms" if has_unit else "")


def cells(
    view: View, bars: Sequence[Bar], start_ms: float, span_ms: float, width: int, marked: Collection[int] = ()
) -> Line:
    """Draw bars in exactly `width` cells. The bar with the largest share of a cell fills it.

    marked: columns whose free cells show a line.
    """
    kinds = filled(bars, start_ms, span_ms, width)
    row = line()
    for kind, run in groupby("mark" if not kind and at in marked else kind for at, kind in enumerate(kinds)):
        glyph = view.glyphs.track if kind == "mark" else view.glyphs.spans.get(kind, " ")
        row = row + line((glyph * len(list(run)), "frame" if kind == "mark" else kind if kind in KINDS else ""))
    return row


def legend(view: View, width: int) -> Line:
    """Draw `queue ░  wait ─  compute █  transfer ▒  stall ▓`."""
    named = take((line((f"{kind} ", "dim"), (view.glyphs.spans[kind], kind)) for kind in KINDS), width - 1)
    return fit(line(" " * max(0, width - named.width - 1)) + named, width)


def parts(trace: Trace, width: int) -> list[Line]:
    """Draw what the time of the request went to, as `mstarctl trace` does."""
    return [fit(line((f" {row}", "dim")), width) for row in parts_lines({"parts": trace.parts}, width - 2)]


def title(view: View, r: RequestStatus, width: int) -> Line:
    """Draw `r-7f3a  audio → speech  1.84 s  TTFT 231  TTFA 402  RTF 0.34`."""
    route = f"{'+'.join(r.inputs)} {view.glyphs.into} {'+'.join(r.outputs)}"
    where = r.state if r.has_ended or not r.node else f"{r.node}, rank {r.rank}"
    rtf = r.rtf(view.t)
    parts = [
        line((safe(r.id), "strong")),
        line((safe(route), "")),
        line((numbers.age(r.age_s(view.t)), "value")),
        pair("TTFT", numbers.whole_ms(r.ttft_ms)),
        pair("TTFA", numbers.whole_ms(r.ttfa_ms)) if "audio" in r.outputs else line(),
        pair("RTF", f"{rtf:.2f}") if rtf is not None else line(),
        line((str(r.tokens), "value"), (" tokens", "dim")),
        line((safe(where), view.node_role(r.node) or "ok")),
        line((safe(r.progress), "value")),
        line((safe(r.error or r.why), "bad" if r.error else "warn")),
    ]
    return fit(line(" ") + take(parts, width - 2), width)
