"""Windows over long lists: which rows are shown, which one is marked, the thumb at the right. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mstarctl.top.data.view import View
from mstarctl.top.drawing.line import Line, fit, line, over

FOLDS_BELOW: Final = 70
"""Cells below which events and log lines take more than one row: in one, what they tell would be cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """offset: of the first row that is shown; cursor: key of the marked row, which it follows as rows move."""

    offset: int = 0
    cursor: str | None = None


def scrolled(keys: Sequence[str], window: Window, height: int) -> Window:
    """The window moved as little as needed to hold the cursor's row; the cursor stays, also when its row is gone."""
    if not keys or height < 1:
        return Window(cursor=window.cursor)
    last = max(0, len(keys) - height)
    offset = min(window.offset, last)
    if window.cursor in keys:
        at = keys.index(window.cursor)
        offset = min(max(offset, at - height + 1), at)
    return Window(offset=max(0, min(offset, last)), cursor=window.cursor)


def moved(keys: Sequence[str], window: Window, by: int) -> Window:
    """The cursor `by` rows on, from the first shown row when there is none. It stays inside the list."""
    if not keys:
        return window
    if window.cursor not in keys:
        start = min(window.offset, len(keys) - 1) if by > 0 else len(keys) - 1
        return Window(offset=window.offset, cursor=keys[start])
    at = min(max(keys.index(window.cursor) + by, 0), len(keys) - 1)
    return Window(offset=window.offset, cursor=keys[at])


def framed(
    view: View, rows: Sequence[Line], keys: Sequence[str], window: Window, total: int, width: int, height: int
) -> list[Line]:
    """The shown `rows` with their `keys` as exactly `height` lines; the marked one stands out, a thumb at the right."""
    is_scrolling = total > height
    inner = width - (1 if is_scrolling else 0)
    found = []
    for index in range(height):
        made = fit(rows[index], inner) if index < len(rows) else fit(line(), inner)
        if index < len(keys) and keys[index] == window.cursor:
            made = over(made, "selected")
        found.append(made + thumb(view, index, height, total, window.offset) if is_scrolling else made)
    return found


def thumb(view: View, index: int, height: int, total: int, offset: int) -> Line:
    """One cell of a scroll bar."""
    size = max(1, height * height // max(1, total))
    top = round(offset * (height - size) / max(1, total - height))
    return line((view.glyphs.thumb if top <= index < top + size else " ", "dim"))
