"""Frozen state of the screen: page, selections, filters, zoom. Each key makes a new one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from mstarctl.top.data.spans import Trace
from mstarctl.top.layout.request_list import Sort
from mstarctl.top.layout.scroll import Window
from mstarctl.top.layout.waterfall import Zoom

PAGES: Final = ("overview", "graph", "requests", "ranks", "logs", "events", "bench", "sessions")
"""Screens in the order of the keys 1 to 8. `request` is a ninth screen, opened from a row."""

MODELS: Final = "models"
"""The screen of a gateway."""

TITLES: Final = {name: name.capitalize() for name in PAGES}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """page: one of `PAGES`, or `request`. panel: `requests` or `ranks`, of the overview. request: key if open.

    dismissed: time of the failure that is no longer shown.
    """

    page: str = "overview"
    panel: str = "requests"
    sort: Sort = field(default_factory=Sort)
    requests: Window = field(default_factory=Window)
    events: Window = field(default_factory=Window)
    bench: Window = field(default_factory=Window)
    sessions: Window = field(default_factory=Window)
    rank: str | None = None
    node: str = ""
    walk: str = ""
    log_source: str = ""
    log_text: str = ""
    log_above: int = 0
    event_text: str = ""
    request: str = ""
    came_from: str = "overview"
    trace: Trace | None = None
    zoom: Zoom = field(default_factory=Zoom)
    dismissed: float = 0.0
    notice: str = ""
    is_notice_error: bool = False
