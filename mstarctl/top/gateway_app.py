"""Textual app that shows the models of a gateway. Used by `top` with a gateway's name."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding

from mstarctl.output.line import Line
from mstarctl.top.data.gateway import GatewayView
from mstarctl.top.layout.gateway.models import models_screen
from mstarctl.top.layout.gateway.tenants import tenants_screen
from mstarctl.top.polled_app import PolledApp


class GatewayApp(PolledApp[GatewayView, None]):
    """The models of one gateway and the memory that they hold, or its tenants.

    shows_tenants: the screen shows nothing else.
    """

    BINDINGS: ClassVar = [Binding("t", "tenants"), Binding("q,escape,ctrl+c", "quit", priority=True)]
    shows_tenants = False

    def action_tenants(self) -> None:
        """Turn from the models to the tenants, and back."""
        self.shows_tenants = not self.shows_tenants
        self.draw()

    def rows(self, width: int, height: int) -> list[Line]:
        if self.shows_tenants:
            return tenants_screen(self.shown, width, height, self._notice)
        return models_screen(self.shown, self._view, width, height, self._notice)
