"""Event feed, newest last: life cycle, preemptions, restarts, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mstar_core.observe.frames import Event
from mstarctl.output.facts import facts_text
from mstarctl.output.line import Line, cells, clip, fit, left, line, safe, take, wrap
from mstarctl.top.data.view import View
from mstarctl.top.layout.scroll import FOLDS_BELOW, Window, framed, scrolled

BAD: Final = ("died", "failed", "fatal", "unhealthy", "lost", "stall", "killed")
WORN: Final = ("preempt", "refused", "restart", "degraded", "drain", "stale", "cut", "waiting", "fenced")
GOOD: Final = ("ready", "resumed", "finished")
TEXT_LINES: Final = 3
SHOWN: Final = 4
PROGRESS: Final = "bench.progress"
"""Reports of load tests, which earlier versions added once a second."""

INDENT: Final = "   "


def role_of(kind: str) -> str:
    """Return the role of an event's type."""
    if any(word in kind for word in BAD):
        return "bad"
    if any(word in kind for word in WORN):
        return "warn"
    return "ok" if any(word in kind for word in GOOD) else "accent"


def short(view: View, event: Event) -> Line:
    """Draw one event for the line below a table."""
    return line(
        (f"{view.clock(event.time)} ", "faint"),
        (safe(event.type), role_of(event.type)),
        (f" {facts_text(event.facts)}", "dim"),
    )


def last(view: View, width: int, dismissed: float = 0.0) -> Line:
    """Draw the newest events that fit into one line, first the last bad one. dismissed: it is not before this time."""
    events = [event for event in reversed(view.store.events) if event.type != PROGRESS]
    bad = next((event for event in events if role_of(event.type) == "bad" and event.time > dismissed), None)
    rest = [event for event in events[:SHOWN] if role_of(event.type) != "bad"]
    shown = [short(view, event) for event in ([] if bad is None else [bad]) + rest]
    return fit(line(" ") + take(shown, width - 2, "   "), width)


def matching_events(view: View, text: str) -> list[Event]:
    """Return the events whose type, or the host that they are about, contains `text`."""
    hosts = {child.name: child.host for child in view.store.children.values()}

    def host(event: Event) -> str:
        return str(event.facts.get("host") or hosts.get(str(event.facts.get("child")), ""))

    return [event for event in view.store.events if text in event.type or text in host(event)]


def feed(view: View, width: int, height: int, window: Window, text: str = "") -> tuple[list[Line], list[str]]:
    """Return (exactly `height` lines, newest last; keys of the visible events). text: see `matching_events`."""
    events = matching_events(view, text)
    keys = [str(event.n) for event in events]
    if width < FOLDS_BELOW:
        return _folded(view, events, keys, width, height, window)
    if window.cursor is None:
        window = Window(offset=max(0, len(events) - height))
    window = scrolled(keys, window, height)
    shown = events[window.offset : window.offset + height]
    rows = [full(view, event) for event in shown] or [line(("  no events yet", "dim"))]
    shown_keys = [str(event.n) for event in shown]
    return framed(view, rows, shown_keys, window, len(events), width, height), shown_keys


def full(view: View, event: Event) -> Line:
    """Draw one event as a row."""
    return line(
        (f" {view.clock(event.time)}  ", "dim"),
        (left(safe(event.type), 22), role_of(event.type)),
        ("  " + facts_text(event.facts), ""),
    )


def _folded(
    view: View, events: Sequence[Event], keys: Sequence[str], width: int, height: int, window: Window
) -> tuple[list[Line], list[str]]:
    """Draw the feed on a narrow screen, with the facts of an event below its type."""
    if not events:
        return framed(view, [line(("  no events yet", "dim"))], (), window, 0, width, height), []
    first = last = _first_above(view, events, len(events) - 1, width, height)
    if window.cursor in keys:
        at = keys.index(window.cursor)
        first = min(max(window.offset, _first_above(view, events, at, width, height)), at, last)
    rows: list[Line] = []
    shown: list[str] = []
    for event in events[first:]:
        block = folded(view, event, width)
        rows += block
        shown += [str(event.n)] * len(block)
        if len(rows) >= height:
            break
    rows, shown = rows[:height], shown[:height]
    mean_rows = len(rows) / len(set(shown))  # mean rows per event, for the scroll bar
    total = max(height + 1, round(len(events) * mean_rows)) if first or len(set(shown)) < len(events) else len(rows)
    place = Window(offset=round(first * mean_rows), cursor=window.cursor)
    return framed(view, rows, shown, place, total, width, height), shown


def _first_above(view: View, events: Sequence[Event], at: int, width: int, height: int) -> int:
    """Return the earliest event from which all events up to `at` fit into `height` lines."""
    room = height
    for index in range(at, -1, -1):
        room -= len(folded(view, events[index], width))
        if room < 0:
            return min(index + 1, at)
    return 0


def folded(view: View, event: Event, width: int) -> list[Line]:
    """Draw one event on a narrow screen: in one line if it fits, else with its facts in at most three further lines."""
    inner = width - len(INDENT) - 1  # the last cell may be the scroll bar's
    text = facts_text(event.facts)
    head = line((f" {view.clock(event.time)}  ", "dim"), (safe(event.type), role_of(event.type)))
    if head.width + 2 + cells(text) < width:
        return [head + line(f"  {text}")]
    below = wrap(text, inner)
    if len(below) > TEXT_LINES:
        below = [*below[: TEXT_LINES - 1], clip(" ".join(below[TEXT_LINES - 1 :]), inner)]
    return [head, *(line(INDENT + row) for row in below)]
