"""Footer of every screen: tabs and active keys."""

from __future__ import annotations

from collections.abc import Sequence

from mstarctl.output.line import Line, cells, fit, join, line, safe, take
from mstarctl.top.data.view import TINY, View
from mstarctl.top.layout.state import PAGES, TITLES, State

Hint = tuple[str, str]
"""(displayed key, label)."""


def footer(view: View, state: State, width: int, size: int, hints: Sequence[Hint]) -> list[Line]:
    """Draw one line if tiny, else two."""
    keys = fit(line(" ") + _hints(hints, width - 2), width)
    if state.notice:
        keys = fit(line((f" {safe(state.notice)}", "bad" if state.is_notice_error else "accent")), width)
    return [keys] if size == TINY else [tabs(view, state, width), keys]


def _hints(hints: Sequence[Hint], width: int) -> Line:
    """Draw the hints that fit. The last two, help and quit, are always kept."""
    shown = [line((key, "key"), (f" {label}", "hint")) for key, label in hints]
    while len(shown) > 2 and join(shown).width > width:
        del shown[-3]
    return take(shown, width)


def page_at(x: int) -> str:
    """Return the page whose tab is at a cell of the line of tabs; empty between tabs."""
    start = 0
    for index, page in enumerate(PAGES, start=1):
        end = start + 1 + cells(f" {index} {TITLES[page]} ")
        if start < x < end:
            return page
        start = end
    return ""


def tabs(view: View, state: State, width: int) -> Line:
    """Draw `─ 1 Overview ─ 2 Graph ─ …` with the current tab highlighted."""
    rule = view.glyphs.rule
    parts = []
    for index, page in enumerate(PAGES, start=1):
        text = f" {index} {TITLES[page]} "
        parts.append(line((rule, "frame"), (text, "tab.on" if page == state.page else "tab")))
    if state.page == "request":
        parts.append(line((rule, "frame"), (" request ", "tab.on")))
    row = take(parts, width, "")
    return row + line((rule * (width - row.width), "frame"))
