"""Textual app of one screen that is read again every second. Base of the apps of a host and of a gateway."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from textual.app import App, ComposeResult

from mstar_core.errors import MstarError
from mstarctl.client.store import Store
from mstarctl.output.line import Line
from mstarctl.output.theme import GROUND, LIGHT_GROUND, Mode, has_ground
from mstarctl.top.data.view import View
from mstarctl.top.drawing.glyphs import Glyphs, in_ascii
from mstarctl.top.widgets.pane import Pane

READ_S: Final = 1.0

Shown = TypeVar("Shown")
Result = TypeVar("Result")


class PolledApp(App[Result], Generic[Shown, Result]):
    """A screen that `rows` draws of what `read` returns. shown: the last reading that did not fail."""

    CSS = f"""
    Screen {{ background: {GROUND}; }}
    App.-light Screen {{ background: {LIGHT_GROUND}; }}
    App.-plain Screen {{ background: ansi_default; }}
    """
    TITLE = "mstarctl top"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, read: Callable[[], Shown], first: Shown, *, mode: Mode, glyphs: Glyphs) -> None:
        super().__init__(ansi_color=not has_ground(mode))
        self._read, self.shown, self.mode = read, first, mode
        self._view = View(store=Store(), glyphs=glyphs)
        self._pane = Pane(mode, id="main")
        self._notice = ""

    @abstractmethod
    def rows(self, width: int, height: int) -> list[Line]:
        """Return the rows of the screen."""

    def take(self, shown: Shown) -> None:
        """Take over a reading."""
        self.shown = shown

    def compose(self) -> ComposeResult:
        yield self._pane

    def on_mount(self) -> None:
        self.set_class(not has_ground(self.mode), "-plain")
        self.set_class(self.mode == "light", "-light")
        self._pane.focus()
        self.set_interval(READ_S, self.read_again)

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    def read_again(self) -> None:
        """Read in a thread; an interval that ends before the last read is skipped."""
        if not self.workers:
            self.run_worker(self._refresh, thread=True)

    def _refresh(self) -> None:
        try:
            shown, notice = self._read(), ""
        except MstarError as error:
            shown, notice = self.shown, error.title
        self.call_from_thread(self._show, shown, notice)

    def _show(self, shown: Shown, notice: str) -> None:
        self._notice = notice
        self.take(shown)
        self.draw()

    def draw(self) -> None:
        """Draw the screen."""
        size = self._pane.size
        rows = self.rows(size.width, max(2, size.height))
        self._pane.show([in_ascii(row) for row in rows] if self._view.glyphs.is_ascii else rows)
