"""Progress of requests for telemetry: their position, running walks and finished walks."""

from __future__ import annotations

from collections.abc import Mapping

from mstar_core.conductor.request import ConductorRequest
from mstar_core.config.graph_view import main_nodes
from mstar_core.messages.telemetry import RequestNews
from mstar_core.plugin.spec import ModelSpec


class Progress:
    """Collects changed requests until the next report. Owned by the conductor."""

    def __init__(self, spec: ModelSpec) -> None:
        self._nodes = main_nodes(spec)
        self._aliases = spec.walk_aliases
        self._cached = frozenset(node.name for node in spec.nodes if node.kv is not None)
        self._changed: set[int] = set()
        self._last: list[RequestNews] = []

    def changed(self, handle: int) -> None:
        """Mark a request as changed."""
        self._changed.add(handle)

    def ended(self, request: ConductorRequest) -> None:
        """Add a last report of a request that ended. The api reports how it ended."""
        self._changed.discard(request.handle)
        self._last.append(self._of(request))

    def take(self, requests: Mapping[int, ConductorRequest]) -> list[RequestNews]:
        """Return the changes since the last call."""
        changed, self._changed = self._changed, set()
        last, self._last = self._last, []
        return last + [self._of(requests[handle]) for handle in changed if handle in requests]

    def _of(self, request: ConductorRequest) -> RequestNews:
        # The runs of a wish are taken in order, so the first unfinished one is running.
        waiting = (
            [run.pending[number].walk for number in run.order if run.pending[number].waiting]
            for run in request.partitions.values()
        )
        active = [walks[0] for walks in waiting if walks]
        walk = self._place(active)
        node = "" if walk is None else self._nodes.get(self._aliases.get(walk, walk), "")
        return RequestNews(
            handle=request.handle,
            node=node or None,
            walk=walk,
            rank=None if walk is None or not node else request.homes.of(walk).get(node),
            active=active,
            walks=dict(request.walks),
            cached_tokens=request.cached_tokens,
            placed="; ".join(request.homes.reasons) or None,
        )

    def _place(self, active: list[str]) -> str | None:
        """Return the walk that gives the position of a request: the last one with a cached node, else the last one."""
        cached = [walk for walk in active if self._nodes.get(self._aliases.get(walk, walk)) in self._cached]
        return next(reversed(cached or active), None)
