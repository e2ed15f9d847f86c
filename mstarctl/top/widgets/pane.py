"""Panes of finished lines. The main pane has the bindings of all keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

from rich.color import Color
from rich.segment import Segment
from rich.style import Style as RichStyle
from textual import events
from textual.binding import Binding
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from mstarctl.output.line import Line
from mstarctl.output.theme import Mode, style_of
from mstarctl.top.keys import KEYS


class Pane(Widget, can_focus=True):
    """Rows of the widget's width. Owned by a screen, which calls `show` with all rows."""

    DEFAULT_CSS = "Pane { width: 1fr; height: 1fr; }"

    class Clicked(Message):
        """A click. x, y: cell inside the pane."""

        def __init__(self, x: int, y: int) -> None:
            super().__init__()
            self.x, self.y = x, y

    class Scrolled(Message):
        """A turn of the mouse wheel. by: rows."""

        def __init__(self, by: int) -> None:
            super().__init__()
            self.by = by

    def __init__(self, mode: Mode, id: str | None = None) -> None:
        super().__init__(id=id)
        self.mode: Mode = mode
        self.rows: Sequence[Line] = ()

    def show(self, rows: Sequence[Line]) -> int:
        """Draw these rows. Returns the number of changed rows."""
        before, self.rows = self.rows, rows
        width = self.size.width
        if len(before) != len(rows):
            self.refresh()
            return len(rows)
        changed = [y for y, (old, new) in enumerate(zip(before, rows, strict=True)) if old != new]
        if changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))
        return len(changed)

    def render_line(self, y: int) -> Strip:
        """Return one row for Textual."""
        if y >= len(self.rows):
            return Strip.blank(self.size.width, rich_style("", self.mode))
        return strip(self.rows[y], self.mode)

    def on_click(self, event: events.Click) -> None:
        self.post_message(self.Clicked(event.x, event.y))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.post_message(self.Scrolled(3))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.post_message(self.Scrolled(-3))


@lru_cache(maxsize=1024)
def strip(row: Line, mode: Mode) -> Strip:
    """Convert a line to a Textual strip."""
    return Strip([Segment(text, rich_style(role, mode)) for text, role in row.spans], row.width)


@lru_cache(maxsize=512)
def rich_style(role: str, mode: Mode) -> RichStyle:
    """Convert a role's style to a Rich style."""
    style = style_of(role, mode)
    return RichStyle(
        color=colour(style.fg),
        bgcolor=colour(style.bg),
        bold=style.bold or None,
        reverse=style.reverse or None,
        underline=style.underline or None,
    )


def colour(text: str) -> Color | None:
    """Parse `#rrggbb`, or the number of one of the 16 colours."""
    if not text:
        return Color.default()
    return Color.parse(text) if text.startswith("#") else Color.from_ansi(int(text))


class MainPane(Pane):
    """Keys work while the pane has the focus: not in the filter bar and not in a dialog."""

    BINDINGS: ClassVar = [
        Binding(key.keys, f"app.{key.action}", key.label, show=key.footer > 0, key_display=key.shown, tooltip=key.help)
        for key in KEYS
    ]
