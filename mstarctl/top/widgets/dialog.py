"""Modal dialog for help, descriptions, JSON and questions, with scrolling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from textual import events
from textual.app import ComposeResult
from textual.screen import ModalScreen

from mstarctl.output.line import Line, fit, line, over
from mstarctl.output.theme import Mode
from mstarctl.top.drawing.glyphs import Glyphs, in_ascii
from mstarctl.top.widgets.pane import Pane

Rows = Callable[[int], Sequence[Line]]
"""Lines of the dialog for an inner width."""


REDRAW_S: Final = 0.5


class Dialog(ModalScreen[str]):
    """Returns the answer of the pressed key, or an empty text. answers: key -> answer.

    Escape and q close each dialog, enter those without answers. on_key: handles further keys.
    is_live: the rows are drawn again twice a second.
    """

    DEFAULT_CSS = "Dialog { align: center middle; } Dialog > Pane { width: auto; height: auto; }"

    def __init__(
        self,
        title: str,
        rows: Rows,
        glyphs: Glyphs,
        mode: Mode,
        *,
        answers: Mapping[str, str] | None = None,
        hint: str = "esc close",
        on_key: Callable[[str], bool] | None = None,
        is_live: bool = False,
    ) -> None:
        super().__init__()
        self._title, self._rows, self._glyphs, self._mode = title, rows, glyphs, mode
        self._answers, self._hint = dict(answers or {}), hint
        self._also, self._is_live = on_key, is_live
        self._offset = 0

    def compose(self) -> ComposeResult:
        yield Pane(self._mode)

    def on_mount(self) -> None:
        self.redraw()
        self.query_one(Pane).focus()
        if self._is_live:
            self.set_interval(REDRAW_S, self.redraw)

    def on_resize(self) -> None:
        self.redraw()

    def redraw(self) -> None:
        """Lay out the dialog for the size of the terminal."""
        wide, tall = self.app.size
        width = max(20, min(wide - 4, 116))
        body = list(self._rows(width - 4))
        width = max(30, min(width, max((row.width for row in body), default=0) + 4, wide))
        room = max(1, tall - 4)
        self._offset = max(0, min(self._offset, len(body) - room))
        shown = body[self._offset : self._offset + room]
        pane = self.query_one(Pane)
        pane.styles.width, pane.styles.height = width, len(shown) + 2
        more = len(body) - len(shown)
        pane.show(
            framed(
                shown,
                self._title,
                self._hint + (f"   {self._offset + 1}-{self._offset + len(shown)} of {len(body)}" if more else ""),
                width,
                self._glyphs,
            )
        )

    def on_key(self, event: events.Key) -> None:
        """Handle every key, so that none reaches the screen below."""
        event.stop()
        event.prevent_default()
        key = event.key
        if key in self._answers:
            self.dismiss(self._answers[key])
        elif key in ("escape", "q") or (key == "enter" and not self._answers):
            self.dismiss("")
        elif self._also is not None and self._also(key):
            return
        else:
            step = {"down": 1, "j": 1, "up": -1, "k": -1, "pagedown": 10, "pageup": -10, "home": -9999, "end": 9999}
            if key in step:
                self._offset += step[key]
                self.redraw()

    def on_pane_scrolled(self, event: Pane.Scrolled) -> None:
        self._offset += event.by
        self.redraw()


def framed(rows: Sequence[Line], title: str, hint: str, width: int, glyphs: Glyphs) -> list[Line]:
    """Draw the rows in a frame with a title above and a hint below."""
    a, b, c, d, flat, tall = tuple(glyphs.box)
    head = line((f"{a}{flat} ", "accent"), (title, "title"), " ")
    foot = line((f"{c}{flat} ", "accent"), (hint, "hint"), " ")
    lines = [
        fit(head, width - 1, "accent")
        if head.width >= width
        else head + line((flat * (width - head.width - 1) + b, "accent"))
    ]
    lines += [line((f"{tall} ", "accent"), fit(row, width - 4), (f" {tall}", "accent")) for row in rows]
    lines.append(foot + line((flat * max(0, width - foot.width - 1) + d, "accent")))
    shown = [in_ascii(row) for row in lines] if glyphs.is_ascii else lines
    return [over(fit(row, width), "bar") for row in shown]
