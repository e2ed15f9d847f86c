"""Whole screens at any size. `top`, `--once` and exports draw with `compose`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from mstarctl.output.facts import facts_text
from mstarctl.output.line import Line, cells, fit, line, pair, safe, window, wrap
from mstarctl.output.moments import MOMENTS
from mstarctl.output.units import counted, size_text
from mstarctl.top.data.lost import without_lost
from mstarctl.top.data.view import LEAST_HEIGHT, LEAST_WIDTH, NORMAL, TINY, View, size_of
from mstarctl.top.drawing import numbers
from mstarctl.top.drawing.glyphs import in_ascii
from mstarctl.top.layout import bench, events, logs, request_list, sessions, waterfall
from mstarctl.top.layout.footer import Hint, footer
from mstarctl.top.layout.graph import screen as graph
from mstarctl.top.layout.header import header
from mstarctl.top.layout.hosts.frames import blocks
from mstarctl.top.layout.overview_panels import panels
from mstarctl.top.layout.ranks import ranks_page
from mstarctl.top.layout.state import State

Hits = dict[int, tuple[str, str]]
"""Line of the screen -> (kind, key) of a click on it: request, rank, event, column titles, tabs."""


@dataclass(frozen=True, slots=True)
class Painted:
    """A finished screen: lines of equal width, and the objects of its lines."""

    lines: list[Line]
    hits: Hits = field(default_factory=dict)


LEAST_TABLE: Final = 6
"""Rows of the overview that are kept for the table of requests."""

Page = Callable[[View, State, int, int, int], Painted]


def compose(view: View, state: State, width: int, height: int, hints: Sequence[Hint] = ()) -> Painted:
    """Draw a screen of exactly `height` lines of exactly `width` cells."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        text = f"top needs {LEAST_WIDTH}x{LEAST_HEIGHT} cells; this is {width}x{height}"
        return Painted(window([line((text, "warn"))], max(1, height), max(1, width)))
    size = size_of(width, height)
    view = without_lost(view)
    above = header(view, width, size, state.dismissed)
    below = footer(view, state, width, size, hints)
    room = height - len(above) - len(below)
    body = BODIES[state.page](view, state, width, room, size)
    lines = [*above, *window(body.lines, room, width), *below]
    if view.glyphs.is_ascii:
        lines = [in_ascii(row) for row in lines]
    hits: Hits = {row + len(above): hit for row, hit in body.hits.items()}
    if len(below) > 1:
        hits[height - len(below)] = ("tabs", "")
    return Painted(lines, hits)


def overview(view: View, state: State, width: int, height: int, size: int) -> Painted:
    """Draw ranks above, requests in the middle, the newest events below; the graph and curves in free rows."""
    is_panel = state.panel == "ranks"
    chosen = state.rank if is_panel else None
    least = 5 if size == TINY else 8
    top = blocks(view, width, max(1, height - least - (0 if size == TINY else 3)), size, chosen)
    tail = [_status(view, state, width, size)]
    if size > TINY:
        tail.append(events.last(view, width, state.dismissed))
    if size >= NORMAL:
        tail.insert(0, line())
    room = height - len(top) - len(tail)
    rows = len(request_list.chosen(view, state.sort)) + 1
    below = panels(view, width, room - max(LEAST_TABLE, rows), size)
    table, keys = request_list.table(view, width, room - len(below), state.sort, state.requests)
    hits: Hits = {len(top): ("titles", "")}
    hits |= {len(top) + 1 + row: ("request", key) for row, key in enumerate(keys)}
    return Painted([*top, *table, *below, *tail], hits)


def _status(view: View, state: State, width: int, size: int) -> Line:
    total = len(view.store.requests)
    shown = len(request_list.chosen(view, state.sort)) if view.filter.text else total
    if size > TINY:
        return request_list.status(view, shown, total, state.sort, width)
    newest = next((event for event in reversed(view.store.events) if event.type != events.PROGRESS), None)
    text = line((f" {shown} of {total}", "dim"), ("   ", ""))
    if view.filter.text:
        return fit(text + pair("filter:", safe(view.filter.text), "accent"), width)
    return fit(
        text
        + (
            line((safe(newest.type), events.role_of(newest.type)), (f" {facts_text(newest.facts)}", "dim"))
            if newest
            else line()
        ),
        width,
    )


def graph_body(view: View, state: State, width: int, height: int, size: int) -> Painted:
    """Draw the dataflow."""
    return Painted(graph.graph_page(view, width, height, size, state.walk, state.node))


def requests_body(view: View, state: State, width: int, height: int, size: int) -> Painted:
    """Draw the table of requests."""
    table, keys = request_list.table(view, width, height - 1, state.sort, state.requests)
    hits: Hits = {0: ("titles", ""), **{row + 1: ("request", key) for row, key in enumerate(keys)}}
    return Painted([*table, _status(view, state, width, size)], hits)


def ranks_body(view: View, state: State, width: int, height: int, size: int) -> Painted:
    """Draw the ranks, one of them in full."""
    lines, keys = ranks_page(view, width, height, size, state.rank)
    return Painted(lines, {row: ("rank", key) for row, key in enumerate(keys)})


def logs_body(view: View, state: State, width: int, height: int, size: int) -> Painted:
    """Draw the merged tail."""
    rows = logs.tail(view, width, height - 1, state.log_above, state.log_source, state.log_text)
    return Painted([*rows, logs.status(view, state.log_above, state.log_source, state.log_text, width)])


def events_body(view: View, state: State, width: int, height: int, size: int) -> Painted:
    """Draw the feed of events."""
    rows, keys = events.feed(view, width, height - 1, state.events, state.event_text)
    total = len(view.store.events)
    kinds = pair("   type:", safe(state.event_text), "accent") if state.event_text else line()
    end = fit(line((f" {counted(total, 'event')} kept", "dim")) + kinds, width)
    return Painted([*rows, end], {row: ("event", key) for row, key in enumerate(keys)})


def bench_body(view: View, state: State, width: int, height: int, size: int) -> Painted:
    """Draw the load tests."""
    rows, keys = bench.bench_page(view, width, height, state.bench)
    return Painted(rows, {row + 1: ("recording", key) for row, key in enumerate(keys)})


def sessions_body(view: View, state: State, width: int, height: int, size: int) -> Painted:
    """Draw the sessions."""
    rows, keys = sessions.sessions_page(view, width, height, state.sessions)
    return Painted(rows, {row + 1: ("session", key) for row, key in enumerate(keys)})


def request_body(view: View, state: State, width: int, height: int, size: int) -> Painted:
    """Draw one request: its waterfall, then its fields."""
    kept = None if state.trace is None else state.trace.status  # it stays open after it has left the store
    r = view.store.requests.get(state.request) or kept
    if r is None:
        gone = line(("  this request is no longer shown; esc goes back", "dim"))
        return Painted(window([line(), gone], height, width))
    trace = state.trace
    rows = [waterfall.title(view, r, width)]
    rows += waterfall.parts(trace, width) if trace is not None else []
    rows.append(waterfall.legend(view, width))
    if trace is not None and trace.lanes:
        rows += waterfall.waterfall(view, trace.lanes, width, state.zoom, waterfall.marks_of(r))
    else:
        rows.append(line((f"  {safe(trace.why) if trace is not None else 'loading its spans'}", "dim")))
    names = [name for name in r.__struct_fields__ if name not in UNDESCRIBED]
    facts = {name: getattr(r, name) for name in names} | {"started": field_text(view, "started", r.started)}
    rows += [line(), *describe(view, ["started", *names], facts, width)]
    return Painted(window(rows, height, width))


def describe(view: View, names: Sequence[str], values: dict[str, object], width: int) -> list[Line]:
    """Draw fields with their values in as many columns as fit, then long values on separate lines."""
    column_width = 36
    known = [labelled(name, values[name]) for name in names if values[name] not in (None, "", [], {}, 0, 0.0, False)]
    short = [item for item in known if cells(" ".join(item)) <= column_width - 2]
    across = max(1, (width - 2) // column_width)
    rows = []
    for start in range(0, len(short), across):
        row = line(" ")
        for name, text in short[start : start + across]:
            row = row + fit(pair(name, text), column_width - 2) + line("  ")
        rows.append(fit(row, width))
    for name, text in (item for item in known if item not in short):
        first, *more = wrap(text, max(8, width - cells(name) - 3))
        rows.append(fit(line(" ", (f"{name} ", "dim"), (first, "value")), width))
        rows += [fit(line(" " * (cells(name) + 2), (part, "value")), width) for part in more]
    return rows


def labelled(name: str, value: object) -> tuple[str, str]:
    """Return the label and the value with unit of a field: `waited_ms`, 1698 becomes (waited, 1698 ms)."""
    for end in ("_ms", "_s"):
        if name.endswith(end) and isinstance(value, int | float):
            return name.removesuffix(end).replace("_", " "), f"{shown_value(value)} {end[1:]}"
    if name.endswith("_bytes") and isinstance(value, int):
        return name.removesuffix("_bytes").replace("_", " "), size_text(value)
    return name.replace("_", " "), shown_value(value)


def field_text(view: View, name: str, value: object) -> str:
    """Format the value of a field; a moment of the deployment's clock as a time of day."""
    if name in MOMENTS and isinstance(value, float):
        return view.clock(view.epoch_s + value)
    return view.clock(value) if name in ("started_at", "time") and isinstance(value, float) else shown_value(value)


def shown_value(value: object) -> str:
    """Format the value of a field; empty if it is unknown."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return safe(", ".join(f"{key} {one}" for key, one in value.items()))
    if isinstance(value, list | tuple):
        return safe(", ".join(str(one) for one in value))
    return numbers.ms(value) if isinstance(value, float) else safe(str(value))


UNDESCRIBED: Final = (
    "id",
    "handle",
    "started",
    "ended",
    "state",
    "inputs",
    "outputs",
    "ttft_ms",
    "ttfa_ms",
    "tokens",
    "step",
    "steps",
    "step_rate",
)
"""Fields of a request that its title shows already."""

BODIES: Final[dict[str, Page]] = {
    "overview": overview,
    "graph": graph_body,
    "requests": requests_body,
    "ranks": ranks_body,
    "logs": logs_body,
    "events": events_body,
    "bench": bench_body,
    "sessions": sessions_body,
    "request": request_body,
}
