"""Table of requests: choice of columns, order, visible rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from mstar_core.observe.frames import RequestStatus
from mstarctl.output.facts import tick_text
from mstarctl.output.line import Line, cells, clip_inside, fit, left, line, right, safe, with_role
from mstarctl.top.data.pace import STREAMED, Pace, answers_at_once, pace
from mstarctl.top.data.view import View
from mstarctl.top.drawing import numbers
from mstarctl.top.layout.scroll import Window, framed, scrolled


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestColumn:
    """One column. rank: columns with a small rank are kept longest. sort: sort key; None sorts last.

    key_name: the key that sorts by it. kinds: the modalities whose models have the column; empty for all.
    """

    key: str
    title: str
    width: int
    rank: int
    is_right: bool = True
    sort: Callable[[RequestStatus, float], float | str | None] | None = None
    key_name: str = ""
    kinds: frozenset[str] = frozenset()


WHOLE: Final = frozenset({"whole"})
"""Stands for outputs that are complete values, such as actions and tensors."""

STEPPED: Final = frozenset({"steps"})
"""Stands for complete values that are made by a loop of counted steps."""

SPOKEN: Final = frozenset({"audio"})
WRITTEN: Final = frozenset({"text", "audio"})

COLUMNS: Final = (
    RequestColumn(key="id", title="REQUEST", width=12, rank=0, is_right=False, sort=lambda r, t: r.id, key_name="N"),
    RequestColumn(
        key="route",
        title="IN → OUT",
        width=18,
        rank=8,
        is_right=False,
        sort=lambda r, t: "+".join(r.inputs),
        key_name="I",
    ),
    RequestColumn(key="at", title="AT", width=12, rank=1, is_right=False, sort=lambda r, t: in_turn(r), key_name="A"),
    RequestColumn(key="rank", title="RANK", width=4, rank=9, sort=lambda r, t: r.rank, key_name="R"),
    RequestColumn(key="start", title="START", width=8, rank=12, sort=lambda r, t: r.started, key_name="B"),
    RequestColumn(key="age", title="TOOK", width=6, rank=2, sort=lambda r, t: r.age_s(t), kinds=STREAMED, key_name="T"),
    RequestColumn(
        key="latency", title="LATENCY", width=8, rank=2, sort=lambda r, t: r.age_s(t), kinds=WHOLE, key_name="T"
    ),
    RequestColumn(key="hz", title="HZ", width=6, rank=3, kinds=WHOLE),
    RequestColumn(
        key="late", title="TICK", width=8, rank=4, sort=lambda r, t: r.missed_ticks(t), kinds=WHOLE, key_name="L"
    ),
    RequestColumn(
        key="ttft", title="TTFT ms", width=7, rank=3, sort=lambda r, t: r.ttft_ms, kinds=STREAMED, key_name="F"
    ),
    RequestColumn(
        key="ttfa", title="TTFA ms", width=7, rank=7, sort=lambda r, t: r.ttfa_ms, kinds=SPOKEN, key_name="G"
    ),
    RequestColumn(
        key="tokens", title="TOKENS", width=6, rank=4, sort=lambda r, t: r.tokens, kinds=WRITTEN, key_name="K"
    ),
    RequestColumn(
        key="audio", title="AUDIO", width=6, rank=6, sort=lambda r, t: r.audio_s or None, kinds=SPOKEN, key_name="U"
    ),
    RequestColumn(
        key="speed", title="SPEED", width=7, rank=9, sort=lambda r, t: speed(r, t), kinds=WRITTEN, key_name="V"
    ),
    RequestColumn(
        key="steps", title="STEPS", width=7, rank=5, sort=lambda r, t: r.step or None, kinds=STEPPED, key_name="J"
    ),
    RequestColumn(key="wait", title="WAIT ms", width=7, rank=5, sort=lambda r, t: r.waited_ms, key_name="W"),
    RequestColumn(key="pages", title="PAGES", width=5, rank=10, sort=lambda r, t: r.pages, key_name="P"),
    RequestColumn(key="prompt", title="PROMPT", width=6, rank=11, sort=lambda r, t: r.prompt_tokens, key_name="M"),
)
BY_KEY: Final = {column.key: column for column in COLUMNS}
SORTS: Final = (
    "at",
    "age",
    "latency",
    "start",
    "late",
    "ttft",
    "ttfa",
    "tokens",
    "audio",
    "speed",
    "steps",
    "wait",
    "pages",
    "id",
)
"""Columns through which `s` cycles, as far as the model has them."""

ROUTE_MOST: Final = 24
LEAST_NOTE: Final = 14
LEAST_NAME: Final = 7
"""Least cells in which the name of a walk is clipped instead of counted."""

LEAST_COUNT: Final = 1
EXTRA: Final = 10
"""Columns from this rank on are shown on wide terminals, if the last column keeps 40 cells."""
ORDER: Final = {"resume": 0, "run": 0, "prepare": 1, "queue": 2}
A_LONG_TIME_S: Final = 1e9
"""More than the age of any deployment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sort:
    """The order of the table: by the values of one column, largest first unless rising.

    The order by AT is running, prepared, waiting, then ended requests: the oldest first, of ended ones the latest end.
    """

    key: str = "at"
    is_rising: bool = False

    @property
    def label(self) -> str:
        return BY_KEY[self.key].title.lower()


def in_turn(r: RequestStatus) -> float:
    """Return the place in the order by AT: largest for the oldest running request, smallest for the earliest end."""
    if r.ended is not None:
        return r.ended - len(ORDER) * A_LONG_TIME_S
    return -r.started - ORDER.get(r.state, 0) * A_LONG_TIME_S


def speed(r: RequestStatus, t: float) -> float | None:
    """Return seconds of audio per second of the request, or its tokens per second after the first one."""
    if "audio" in r.outputs:
        return r.audio_s / r.age_s(t) if r.audio_s and r.age_s(t) else None
    decode_s = r.age_s(t) - (r.ttft_ms or 0.0) / 1000
    return (r.tokens - 1) / decode_s if r.ttft_ms is not None and r.tokens > 1 and decode_s > 0 else None


def columns_of(kinds: frozenset[str]) -> list[RequestColumn]:
    """Return the columns for a model that makes `kinds`; those of text and sound if that is unknown."""
    produced = (WHOLE | kinds & STEPPED) if answers_at_once(kinds) else kinds or frozenset({"text", "audio"})
    return [column for column in COLUMNS if not column.kinds or column.kinds & produced]


def sorts_of(kinds: frozenset[str]) -> list[str]:
    """Return the columns through which `s` cycles for a model that makes `kinds`."""
    known = {column.key for column in columns_of(kinds)}
    return [key for key in SORTS if key in known]


def choose(
    width: int, kinds: frozenset[str] = frozenset(), *, route: int = 0, wide: bool = True
) -> tuple[list[RequestColumn], int]:
    """Return (columns in order, cells of the last, open column). Columns are added by rank while they fit.

    kinds: of outputs. route: cells of the longest route, for which its column is widened.
    """
    offered = [
        replace(column, width=min(ROUTE_MOST, max(column.width, route))) if column.key == "route" else column
        for column in columns_of(kinds)
    ]
    kept: list[RequestColumn] = []
    room = width - 1
    for column in sorted(offered, key=lambda column: column.rank):
        need = column.width + 2
        spare = 0 if len(kept) < 5 or not wide else LEAST_NOTE if column.rank < EXTRA else 40
        if len(kept) >= 3 and room - need < spare:
            break
        kept.append(column)
        room -= need
    return [column for column in offered if column in kept], max(0, room)


def columns(view: View, width: int) -> tuple[list[RequestColumn], int]:
    """Return the columns and the open cells for the requests of a view."""
    route = max((cells(way(view, r)) for r in view.store.requests.values()), default=0)
    has_steps = any(r.steps for r in view.store.requests.values())
    return choose(width, view.kinds | STEPPED if has_steps else view.kinds, route=route)


def way(view: View, r: RequestStatus) -> str:
    """Return the route of a request by its modalities: `image+text → action`."""
    return f"{_joined(r.inputs)} {view.glyphs.into} {_joined(r.outputs)}"


def place(r: RequestStatus) -> str:
    """Return the place of a request: its node, or its state."""
    return r.state if r.has_ended else r.node or r.state


def chosen(view: View, sort: Sort) -> list[tuple[str, RequestStatus]]:
    """Return the filtered rows in the order that the column titles show; unknown values come last."""
    t = view.t
    rows = [(key, r) for key, r in view.store.requests.items() if view.filter.takes(r, t)]
    value = BY_KEY[sort.key].sort or in_order_of_arrival
    valued = [(value(r, t), r.handle, key, r) for key, r in rows]
    present = sorted((row for row in valued if row[0] is not None), key=lambda row: row[:2], reverse=not sort.is_rising)
    return [(key, r) for _, _, key, r in (*present, *(row for row in valued if row[0] is None))]


def in_order_of_arrival(r: RequestStatus, t: float) -> float:
    """Sort by the handle, which counts requests."""
    return r.handle


def header(view: View, columns: list[RequestColumn], rest: int, sort: Sort) -> Line:
    """Draw the column titles, with an arrow at the sort column."""
    arrow = view.glyphs.up if sort.is_rising else view.glyphs.down
    row = line(" ")
    for column in columns:
        title = column.title.replace("→", view.glyphs.into)
        is_sorted = column.key == sort.key
        if is_sorted:
            title = (title if len(title) < column.width else title.removesuffix(" ms")) + arrow
        cell = right(title, column.width) if column.is_right else left(title, column.width)
        row = row + line((cell, "title" if is_sorted else "head"), "  ")
    return row + line((left("WALKS" if rest >= LEAST_NOTE else "", rest), "head"))


def row(view: View, r: RequestStatus, columns: list[RequestColumn], rest: int, loop: Pace) -> Line:
    """Draw one request. loop: pace of all requests."""
    drawn = line(" ")
    for column in columns:
        text, role = cell(view, r, column.key, loop)
        drawn = drawn + line((right(text, column.width) if column.is_right else left(text, column.width), role), "  ")
    drawn_row = drawn + fit(note(view, r, rest), rest) if rest > 2 else drawn
    return with_role(drawn_row, "dim") if r.has_ended and not r.error else drawn_row


def cell(view: View, r: RequestStatus, key: str, loop: Pace) -> tuple[str, str]:
    """Return (text, role) of one cell."""
    t = view.t
    match key:
        case "id":
            return clip_inside(safe(r.id), BY_KEY["id"].width), "value"
        case "route":
            return way(view, r), ""
        case "at":
            if r.has_ended:
                return r.state, "ok" if r.state == "finished" else "bad" if r.state == "failed" else "dim"
            return (safe(r.node), view.node_role(r.node)) if r.node else (r.state, "warn")
        case "rank":
            return (numbers.NONE if r.rank is None else str(r.rank)), "dim"
        case "start":
            return view.clock(view.epoch_s + r.started) if r.started else numbers.NONE, "dim"
        case "age":
            return numbers.age(r.age_s(t)), ""
        case "latency":
            return f"{1000 * r.age_s(t):.0f} ms", "value"
        case "hz":
            return (f"{loop.hz[r.handle]:.1f}" if r.handle in loop.hz else numbers.NONE), ""
        case "late":
            missed = r.missed_ticks(t)
            return tick_text(missed, has_ended=r.has_ended) or numbers.NONE, "bad" if missed else "dim"
        case "steps":
            return (f"{r.step}/{r.steps}" if r.steps else numbers.NONE), ""
        case "ttft":
            return numbers.whole_ms(r.ttft_ms), ""
        case "ttfa":
            return numbers.whole_ms(r.ttfa_ms), ""
        case "tokens":
            return numbers.count(r.tokens), "value"
        case "audio":
            return (f"{r.audio_s:.1f}s" if r.audio_s else numbers.NONE), "value"
        case "speed":
            rate = speed(r, t)
            unit = "x" if "audio" in r.outputs else "/s"
            return (numbers.NONE if rate is None else f"{rate:.{1 if rate < 100 else 0}f}{unit}"), ""
        case "wait":
            return numbers.whole_ms(r.waited_ms), "warn" if r.waited_ms >= 1000 else "dim"
        case "pages":
            return numbers.count(r.pages), ""
        case "prompt":
            return numbers.count(r.prompt_tokens), "dim"
    raise KeyError(key)


def _joined(modalities: list[str]) -> str:
    return safe("+".join(modalities)) or numbers.NONE


def note(view: View, r: RequestStatus, width: int) -> Line:
    """Draw the open column: the error, the reason of the wait, attempts, or the steps of a loop and the walks."""
    if r.error:
        return line((f"{view.glyphs.failed} {safe(r.error)}", "bad"))
    if r.why:
        return line((safe(r.why), "warn"))
    if width < LEAST_NOTE:
        return line()
    if r.resumption:
        return line((safe(r.resumption), "warn"))
    if r.steps and not r.has_ended:
        told = line((safe(r.progress), "value"), " ")
        return told + _walks(view, r, width - told.width) if width - told.width >= LEAST_NOTE else told
    return _walks(view, r, width)


def _walks(view: View, r: RequestStatus, width: int) -> Line:
    """Draw active walks, and completed ones if they fit."""
    done = [walk for walk in r.walks if walk not in r.active]
    active = line(*((f"{view.glyphs.active}{safe(walk)} ", "flow") for walk in r.active))
    named = line(*((f"{view.glyphs.done}{safe(walk)} ", "dim") for walk in done))
    if named.width + active.width <= width + 1:
        return named + active
    count = line((f"{view.glyphs.done}{len(done)} ", "dim")) if done else line()
    return count + active if count.width + active.width <= width + 1 else _active_walks(view, r.active, width)


def _active_walks(view: View, walks: list[str], width: int) -> Line:
    """Draw the walks that fit; the next one clipped if enough is readable, else the number of the others."""
    row, left_over = line(), list(walks)
    while left_over:
        named = line((f"{view.glyphs.active}{safe(left_over[0])} ", "flow"))
        is_last = len(left_over) == 1
        if row.width + named.width > width - (-1 if is_last else LEAST_COUNT):
            break
        row, left_over = row + named, left_over[1:]
    if not left_over:
        return row
    if not row.spans or width - row.width >= LEAST_NAME:
        return row + line((f"{view.glyphs.active}{safe(left_over[0])}", "flow"))
    return row + line((f"+{len(left_over)}", "dim"))


def table(view: View, width: int, height: int, sort: Sort, window: Window) -> tuple[list[Line], list[str]]:
    """Return (exactly `height` lines: titles and rows; keys of the visible rows)."""
    rows = chosen(view, sort)
    room = max(0, height - 1)
    window = scrolled([key for key, _ in rows], window, room)
    shown = rows[window.offset : window.offset + room]
    chosen_columns, rest = columns(view, width - (1 if len(rows) > room else 0))
    loop = pace((r for _, r in rows), view.t) if answers_at_once(view.kinds) else Pace()
    drawn_rows = [row(view, r, chosen_columns, rest, loop) for _, r in shown] or [empty_row(view)]
    keys = [key for key, _ in shown]
    return [
        fit(header(view, chosen_columns, rest, sort), width),
        *framed(view, drawn_rows, keys, window, len(rows), width, room),
    ][:height], keys


def empty_row(view: View) -> Line:
    """Draw the reason why a table has no rows."""
    if view.store.requests:
        return line(("  no request matches the filter; esc clears it", "dim"))
    return line(("  no requests in flight", "dim"))


def status(view: View, shown: int, total: int, sort: Sort, width: int) -> Line:
    """Draw `17 shown of 17   filter: none   sort: age ↓`."""
    arrow = view.glyphs.up if sort.is_rising else view.glyphs.down
    cut = view.store.truncated.get("requests", 0)
    parts = [
        line((f" {shown} shown of {total}", "dim")),
        line(("filter: ", "dim"), (safe(view.filter.text), "accent") if view.filter.text else ("none", "dim")),
        line((f"sort: {sort.label} {arrow}", "dim")),
        line((f"{cut} more {'was' if cut == 1 else 'were'} not sent", "warn")) if cut else line(),
    ]
    text = line()
    for part in parts:
        if part.spans:
            text = text + line("   ", part) if text.spans else part
    return fit(text, width)
