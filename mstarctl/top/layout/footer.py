"""The foot of every screen: the tabs, and the keys that work now. Keys come from the bindings that are active."""

from __future__ import annotations

from collections.abc import Sequence

from mstarctl.top.data.view import TINY, View
from mstarctl.top.drawing.line import Line, fit, join, line, safe, take
from mstarctl.top.layout.state import PAGES, TITLES, State

Hint = tuple[str, str]
"""(key as it is shown, label)."""


def foot(view: View, state: State, width: int, size: int, hints: Sequence[Hint]) -> list[Line]:
    """One line when tiny, else two."""
    keys = fit(line(" ") + _hints(hints, width - 2), width)
    if state.notice:
        keys = fit(line((f" {safe(state.notice)}", "bad" if state.is_notice_bad else "accent")), width)
    return [keys] if size == TINY else [tabs(view, state, width), keys]


def _hints(hints: Sequence[Hint], width: int) -> Line:
    """As many as fit. The last two, help and leaving, stay whatever else has to go."""
    shown = [line((key, "key"), (f" {label}", "hint")) for key, label in hints]
    while len(shown) > 2 and join(shown).width > width:
        del shown[-3]
    return take(shown, width)


def tabs(view: View, state: State, width: int) -> Line:
    """`─ 1 Overview ─ 2 Graph ─ …`, the shown one lit. Fewer words when narrow."""
    rule = view.glyphs.rule
    parts = []
    for index, page in enumerate(PAGES, start=1):
        text = f" {index} {TITLES[page]} "
        parts.append(line((rule, "frame"), (text, "tab.on" if page == state.page else "tab")))
    if state.page == "request":
        parts.append(line((rule, "frame"), (" request ", "tab.on")))
    row = take(parts, width, "")
    return row + line((rule * (width - row.width), "frame"))
