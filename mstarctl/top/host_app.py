"""Textual app that shows a host and returns the deployment that the operator chooses. Used by `top` without a name."""

from __future__ import annotations

from typing import ClassVar, Final

from textual.binding import Binding

from mstarctl.output.line import Line
from mstarctl.output.theme import Mode
from mstarctl.top.data.host import HostView, ReadHost
from mstarctl.top.drawing.glyphs import Glyphs
from mstarctl.top.layout.hosts.screen import KEYS, host_screen
from mstarctl.top.polled_app import PolledApp
from mstarctl.top.widgets.pane import Pane

TITLE_ROWS: Final = 3


class HostApp(PolledApp[HostView, str]):
    """The deployments and resources of one host. Its result is the name of a deployment, None if it was left."""

    BINDINGS: ClassVar = [
        Binding("up,k", "move(-1)"),
        Binding("down,j", "move(1)"),
        Binding("enter,right", "open"),
        Binding("q,escape,ctrl+c", "quit", priority=True),
        *(Binding(key, f"choose({at})") for at, key in enumerate(KEYS)),
    ]

    def __init__(self, read: ReadHost, first: HostView, *, mode: Mode, glyphs: Glyphs) -> None:
        super().__init__(read, first, mode=mode, glyphs=glyphs)
        self.chosen = 0

    def rows(self, width: int, height: int) -> list[Line]:
        return host_screen(self.shown, self._view, self.chosen, width, height, self._notice)

    def take(self, shown: HostView) -> None:
        """Take over a reading; the same deployment stays chosen."""
        names = [item.name for item in self.shown.deployments]
        name = names[self.chosen] if self.chosen < len(names) else ""
        self.shown = shown
        now = [item.name for item in shown.deployments]
        self.chosen = now.index(name) if name in now else min(self.chosen, max(0, len(now) - 1))

    def action_move(self, by: int) -> None:
        self.chosen = min(max(0, self.chosen + by), max(0, len(self.shown.deployments) - 1))
        self.draw()

    def action_open(self) -> None:
        self.action_choose(self.chosen)

    def action_choose(self, at: int) -> None:
        if at < len(self.shown.deployments):
            self.exit(self.shown.deployments[at].name)

    def on_pane_clicked(self, event: Pane.Clicked) -> None:
        self.action_choose(event.y - TITLE_ROWS)

    def on_pane_scrolled(self, event: Pane.Scrolled) -> None:
        self.action_move(1 if event.by > 0 else -1)
