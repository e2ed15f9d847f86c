"""Pane of the whole screen, with the bindings of all keys."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding

from mstarctl.top.keys import KEYS
from mstarctl.top.widgets.pane import Pane


class MainPane(Pane):
    """Keys work while the pane has the focus: not in the filter bar and not in a dialog."""

    BINDINGS: ClassVar = [
        Binding(key.keys, f"app.{key.action}", key.label, show=key.footer > 0, key_display=key.shown, tooltip=key.help)
        for key in KEYS
    ]
