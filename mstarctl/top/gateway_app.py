"""Textual app that shows the models of a gateway. Used by `top` with a gateway's name."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding

from mstarctl.output.line import Line
from mstarctl.top.data.gateway import GatewayView
from mstarctl.top.layout.gateway.models import models_screen
from mstarctl.top.polled_app import PolledApp


class GatewayApp(PolledApp[GatewayView, None]):
    """The models of one gateway and the memory that they hold."""

    BINDINGS: ClassVar = [Binding("q,escape,ctrl+c", "quit", priority=True)]

    def rows(self, width: int, height: int) -> list[Line]:
        return models_screen(self.shown, self._view, width, height, self._notice)
