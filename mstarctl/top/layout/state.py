"""What the person at the terminal has chosen to see. Frozen; keys make a new one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from mstarctl.top.layout.requests import Sort
from mstarctl.top.layout.scroll import Window
from mstarctl.top.layout.waterfall import Lane, Zoom

PAGES: Final = ("overview", "graph", "requests", "ranks", "logs", "events", "bench")
"""Screens in the order of the keys 1 to 7; `request` is the eighth, opened from a row."""

TITLES: Final = {name: name.capitalize() for name in PAGES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What is known of a request's way. why: instead of lanes, when there are none."""

    request: str
    lanes: tuple[Lane, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """page: one of `PAGES` or `request`. panel: of the overview, `requests` or `ranks`. request: of the open one."""

    page: str = "overview"
    panel: str = "requests"
    sort: Sort = field(default_factory=Sort)
    requests: Window = field(default_factory=Window)
    events: Window = field(default_factory=Window)
    bench: Window = field(default_factory=Window)
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
    notice: str = ""
    is_notice_bad: bool = False
