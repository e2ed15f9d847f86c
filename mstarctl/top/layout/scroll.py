"""Windows over long lists: visible rows, selected row, scroll bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mstarctl.output.line import Line, fit, line, over
from mstarctl.top.data.view import View

FOLDS_BELOW: Final = 70
"""Width below which events and log lines take more than one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """offset: of the first visible row. cursor: key of the selected row, which stays selected when rows move."""

    offset: int = 0
    cursor: str | None = None


def scrolled(keys: Sequence[str], window: Window, height: int) -> Window:
    """Move the window as little as needed to show the cursor. The cursor stays even if its row is gone."""
    if not keys or height < 1:
        return Window(cursor=window.cursor)
    last = max(0, len(keys) - height)
    offset = min(window.offset, last)
    if window.cursor in keys:
        at = keys.index(window.cursor)
        offset = min(max(offset, at - height + 1), at)
    return Window(offset=max(0, min(offset, last)), cursor=window.cursor)


def moved(keys: Sequence[str], window: Window, by: int) -> Window:
    """Move the cursor by `by` rows within the list; without a cursor, start at the first visible row."""
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
    """Draw the visible rows as exactly `height` lines, with the selected row highlighted and a scroll bar."""
    is_scrolling = total > height
    inner = width - (1 if is_scrolling else 0)
    drawn_rows = []
    for index in range(height):
        drawn = fit(rows[index], inner) if index < len(rows) else fit(line(), inner)
        if index < len(keys) and keys[index] == window.cursor:
            drawn = over(drawn, "selected")
        drawn_rows.append(drawn + thumb(view, index, height, total, window.offset) if is_scrolling else drawn)
    return drawn_rows


def thumb(view: View, index: int, height: int, total: int, offset: int) -> Line:
    """Draw one cell of the scroll bar."""
    size = max(1, height * height // max(1, total))
    top = round(offset * (height - size) / max(1, total - height))
    return line((view.glyphs.thumb if top <= index < top + size else " ", "dim"))
