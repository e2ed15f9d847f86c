"""What a layout function sees: the store at one moment, its history, and how to draw. Made by the session, frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from typing import Final

from mstar_core.observe.filter import Filter
from mstar_core.observe.frames import NodeStatus
from mstar_core.observe.store import Store
from mstarctl.top.data.history import History
from mstarctl.top.drawing.glyphs import UNICODE, Glyphs
from mstarctl.top.drawing.theme import NODE_COLOURS

TINY, SMALL, NORMAL, WIDE = range(4)
LEAST_WIDTH: Final = 40
LEAST_HEIGHT: Final = 12


def size_of(width: int, height: int) -> int:
    """One of TINY, SMALL, NORMAL, WIDE: the smaller of what the width and the height allow."""
    by_width = next(size for size, least in ((WIDE, 160), (NORMAL, 100), (SMALL, 60), (TINY, 0)) if width >= least)
    by_height = next(size for size, least in ((WIDE, 30), (SMALL, 18), (TINY, 0)) if height >= least)
    return min(by_width, by_height)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How the picture came here. state: live, paused, stale, connecting, replay, ended. why: for stale and ended.

    behind: frames that came since the picture was frozen; back_s: how far behind the newest frame it is.
    """

    state: str = "live"
    hz: float = 4.0
    why: str = ""
    behind: int = 0
    back_s: float = 0.0
    is_recording: bool = False
    speed: float = 1.0
    progress: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """One line of a log as it came. level, time and message are taken from JSON lines; plain text has none."""

    source: str
    message: str
    level: str = ""
    time: str = ""
    request: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One picture. phase: of the animation, up five times a second while things move; zone: None is local time."""

    store: Store
    history: History = field(default_factory=History)
    link: Link = Link()
    glyphs: Glyphs = UNICODE
    filter: Filter = field(default_factory=Filter)
    logs: Sequence[Logged] = ()
    recordings: Sequence[dict[str, object]] = ()
    phase: int = 0
    readonly: bool = False
    zone: tzinfo | None = None

    @property
    def t(self) -> float:
        """Now, on the deployment's clock."""
        return self.store.t

    def clock(self, time: float) -> str:
        """A time of day of seconds since the epoch."""
        return datetime.fromtimestamp(time, tz=self.zone).strftime("%H:%M:%S")

    def node_role(self, name: str | None) -> str:
        """The colour of a node, the same on every screen: by its place in the graph."""
        names = [node.name for node in self.store.graph.nodes] or sorted({n.name for n in self.store.nodes.values()})
        return f"node.{names.index(name) % NODE_COLOURS}" if name in names else ""

    def nodes_of(self, rank: int) -> list[tuple[str, NodeStatus]]:
        """Nodes of a rank with their keys, in the graph's order."""
        order = {node.name: place for place, node in enumerate(self.store.graph.nodes)}
        found = [(key, node) for key, node in self.store.nodes.items() if node.rank == rank]
        return sorted(found, key=lambda pair: (order.get(pair[1].name, len(order)), pair[0]))

    def recent(self, part: str, key: str, name: str) -> list[float | None]:
        """A series of the history up to this picture."""
        return self.history.values(part, key, name, self.t)
