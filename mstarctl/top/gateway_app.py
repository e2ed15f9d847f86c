"""Textual app that shows the models of a gateway. Used by `top` with a gateway's name."""

from __future__ import annotations

from typing import ClassVar, Final

from textual.app import App, ComposeResult
from textual.binding import Binding

from mstar_core.errors import MstarError
from mstarctl.client.store import Store
from mstarctl.output.theme import GROUND, LIGHT_GROUND, Mode, has_ground
from mstarctl.top.data.gateway import GatewayView, ReadGateway
from mstarctl.top.data.view import View
from mstarctl.top.drawing.glyphs import Glyphs, in_ascii
from mstarctl.top.layout.gateway.models import models_screen
from mstarctl.top.widgets.pane import Pane

READ_S: Final = 1.0


class GatewayApp(App[None]):
    """The models of one gateway and the memory that they hold."""

    CSS = f"""
    Screen {{ background: {GROUND}; }}
    App.-light Screen {{ background: {LIGHT_GROUND}; }}
    App.-plain Screen {{ background: ansi_default; }}
    """
    TITLE = "mstarctl top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [Binding("q,escape,ctrl+c", "quit", priority=True)]

    def __init__(self, read: ReadGateway, first: GatewayView, *, mode: Mode, glyphs: Glyphs) -> None:
        super().__init__(ansi_color=not has_ground(mode))
        self._read, self.gateway, self.mode = read, first, mode
        self._view = View(store=Store(), glyphs=glyphs)
        self._pane = Pane(mode, id="main")
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
        """Read the gateway in a thread; an interval that ends before the last read is skipped."""
        if not self.workers:
            self.run_worker(self._refresh, thread=True)

    def _refresh(self) -> None:
        try:
            gateway, notice = self._read(), ""
        except MstarError as error:
            gateway, notice = self.gateway, error.title
        self.call_from_thread(self._show, gateway, notice)

    def _show(self, gateway: GatewayView, notice: str) -> None:
        self.gateway, self._notice = gateway, notice
        self.draw()

    def draw(self) -> None:
        """Draw the screen."""
        size = self._pane.size
        rows = models_screen(self.gateway, self._view, size.width, max(2, size.height), self._notice)
        self._pane.show([in_ascii(row) for row in rows] if self._view.glyphs.is_ascii else rows)
