"""The pane of the whole picture, which holds the bindings of every key."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding

from mstarctl.top.keys import KEYS
from mstarctl.top.widgets.pane import Pane


class MainPane(Pane):
    """Keys work while it has the focus, so not while text is typed or a sheet is open."""

    BINDINGS: ClassVar = [
        Binding(key.keys, f"app.{key.action}", key.label, show=key.foot > 0, key_display=key.shown, tooltip=key.help)
        for key in KEYS
    ]
