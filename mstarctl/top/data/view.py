"""View: the frozen input of layout functions. It contains a state, its history and display options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from typing import Final

from mstar_core.observe.filter import Filter
from mstar_core.observe.frames import LOCAL, NodeStatus
from mstarctl.client.store import Store
from mstarctl.output.theme import NODE_COLOURS
from mstarctl.top.data.history import History
from mstarctl.top.data.logs import Logged
from mstarctl.top.drawing.glyphs import UNICODE, Glyphs

TINY, SMALL, NORMAL, WIDE = range(4)
LEAST_WIDTH: Final = 40
LEAST_HEIGHT: Final = 12


def size_of(width: int, height: int) -> int:
    """Return TINY, SMALL, NORMAL or WIDE, the largest that fits both width and height."""
    by_width = next(size for size, least in ((WIDE, 160), (NORMAL, 100), (SMALL, 60), (TINY, 0)) if width >= least)
    by_height = next(size for size, least in ((WIDE, 30), (SMALL, 18), (TINY, 0)) if height >= least)
    return min(by_width, by_height)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """State of the connection: live, paused, stale, connecting, replay, ended. why: reason of stale and ended.

    behind: frames received since the view was paused; back_s: seconds behind the newest frame.
    """

    state: str = "live"
    hz: float = 4.0
    why: str = ""
    behind: int = 0
    back_s: float = 0.0
    is_recording: bool = False
    speed: float = 1.0
    progress: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether the watched deployment has ended; `why` begins with its last state."""
        return self.state == "ended" and self.why != ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that a screen shows. phase: step of the animation, five per second; zone: None is local time."""

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
    def kinds(self) -> frozenset[str]:
        """Modalities that the model makes, from its graph; from its requests if the graph does not name them."""
        named = frozenset(e.modality for e in self.store.graph.edges if e.modality and e.source and not e.into)
        return named or frozenset(kind for r in self.store.requests.values() for kind in r.outputs)

    @property
    def t(self) -> float:
        """Time of the state, on the deployment's clock."""
        return self.store.t

    def clock(self, time: float) -> str:
        """Return the time of day of seconds since the epoch."""
        return datetime.fromtimestamp(time, tz=self.zone).strftime("%H:%M:%S")

    @property
    def epoch_s(self) -> float:
        """Time at which the deployment's clock was 0, in seconds since the epoch."""
        head = self.store.deployment
        return head.started_at - head.started

    def node_role(self, name: str | None) -> str:
        """Return the theme role that colours a node on all screens. It depends on the node's position in the graph."""
        names = [node.name for node in self.store.graph.nodes] or sorted({n.name for n in self.store.nodes.values()})
        return f"node.{names.index(name) % NODE_COLOURS}" if name in names else ""

    @property
    def hosts(self) -> list[str]:
        """Keys of the hosts, the supervisor's first; empty if the deployment has no other."""
        keys = {*self.store.hosts, *(rank.host or LOCAL for rank in self.store.ranks.values())}
        return sorted(keys, key=lambda key: (key != LOCAL, key)) if keys - {LOCAL} else []

    @property
    def rank_keys(self) -> list[str]:
        """Keys of the ranks by host and number."""
        ranks = self.store.ranks
        return sorted(ranks, key=lambda key: (ranks[key].host, ranks[key].rank))

    def host_of(self, rank: int | str) -> str:
        """Return the key of a rank's host."""
        status = self.store.ranks.get(str(rank))
        return (status.host if status is not None else "") or LOCAL

    def is_reached(self, host: str) -> bool:
        """Return whether a host's agent reports, so that its figures are current."""
        status = self.store.hosts.get(host)
        return status is None or status.state in ("", "ready")

    def is_ended(self, rank: int) -> bool:
        """Return whether the process of a rank has ended."""
        status = self.store.ranks.get(str(rank))
        return status is not None and status.state == "ended"

    def group_of(self, name: str, rank: int) -> list[int]:
        """Return the ranks that run a node together, the leader first; only `rank` without tensor parallelism."""
        others = self.store.ranks.values()
        return [rank, *sorted(r.rank for r in others if name in r.follows and r.group[:1] == [rank])]

    def nodes_of(self, rank: int) -> list[tuple[str, NodeStatus]]:
        """Return the nodes of a rank with their keys, in the graph's order."""
        order = {node.name: place for place, node in enumerate(self.store.graph.nodes)}
        pairs = [(key, node) for key, node in self.store.nodes.items() if node.rank == rank]
        return sorted(pairs, key=lambda pair: (order.get(pair[1].name, len(order)), pair[0]))

    def recent(self, part: str, key: str, name: str) -> list[float | None]:
        """Return a series of the history up to the time of this view."""
        return self.history.values(part, key, name, self.t)
