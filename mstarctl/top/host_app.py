"""Textual app that shows a host and returns the deployment that the operator chooses. Used by `top` without a name."""

from __future__ import annotations

from typing import ClassVar, Final

from textual.app import App, ComposeResult
from textual.binding import Binding

from mstar_core.errors import MstarError
from mstarctl.client.store import Store
from mstarctl.output.theme import GROUND, LIGHT_GROUND, Mode, has_ground
from mstarctl.top.data.host import HostView, ReadHost
from mstarctl.top.data.view import View
from mstarctl.top.drawing.glyphs import Glyphs, in_ascii
from mstarctl.top.layout.hosts.screen import KEYS, host_screen
from mstarctl.top.widgets.pane import Pane

READ_S: Final = 1.0
TITLE_ROWS: Final = 3


class HostApp(App[str]):
    """The deployments and resources of one host. Its result is the name of a deployment, None if it was left."""

    CSS = f"""
    Screen {{ background: {GROUND}; }}
    App.-light Screen {{ background: {LIGHT_GROUND}; }}
    App.-plain Screen {{ background: ansi_default; }}
    """
    TITLE = "mstarctl top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        Binding("up,k", "move(-1)"),
        Binding("down,j", "move(1)"),
        Binding("enter,right", "open"),
        Binding("q,escape,ctrl+c", "quit", priority=True),
        *(Binding(key, f"take({at})") for at, key in enumerate(KEYS)),
    ]

    def __init__(self, read: ReadHost, first: HostView, *, mode: Mode, glyphs: Glyphs) -> None:
        super().__init__(ansi_color=not has_ground(mode))
        self._read, self.host, self.mode = read, first, mode
        self._view = View(store=Store(), glyphs=glyphs)
        self._pane = Pane(mode, id="main")
        self.chosen = 0
        self._notice = ""

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
        """Read the host in a thread; an interval that ends before the last read is skipped."""
        if not self.workers:
            self.run_worker(self._refresh, thread=True)

    def _refresh(self) -> None:
        try:
            host, notice = self._read(), ""
        except MstarError as error:
            host, notice = self.host, error.title
        self.call_from_thread(self._show, host, notice)

    def _show(self, host: HostView, notice: str) -> None:
        names = [item.name for item in self.host.deployments]
        name = names[self.chosen] if self.chosen < len(names) else ""
        self.host, self._notice = host, notice
        now = [item.name for item in host.deployments]
        self.chosen = now.index(name) if name in now else min(self.chosen, max(0, len(now) - 1))
        self.draw()

    def draw(self) -> None:
        """Draw the screen."""
        size = self._pane.size
        rows = host_screen(self.host, self._view, self.chosen, size.width, max(2, size.height), self._notice)
        self._pane.show([in_ascii(row) for row in rows] if self._view.glyphs.is_ascii else rows)

    def action_move(self, by: int) -> None:
        self.chosen = min(max(0, self.chosen + by), max(0, len(self.host.deployments) - 1))
        self.draw()

    def action_open(self) -> None:
        self.action_take(self.chosen)

    def action_take(self, at: int) -> None:
        if at < len(self.host.deployments):
            self.exit(self.host.deployments[at].name)

    def on_pane_clicked(self, event: Pane.Clicked) -> None:
        self.action_take(event.y - TITLE_ROWS)

    def on_pane_scrolled(self, event: Pane.Scrolled) -> None:
        self.action_move(1 if event.by > 0 else -1)
