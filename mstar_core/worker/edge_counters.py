"""What goes over the edges of this rank: items and bytes of its streams, of values that leave, and how long it took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from mstar_core.messages.telemetry import EdgeNews

if TYPE_CHECKING:
    from mstar_core.worker.request import WorkerRequest

ID_BYTES: Final = 8


class Route(NamedTuple):
    """Between which nodes and ranks."""

    name: str
    source: str
    into: str
    source_rank: int
    into_rank: int
    is_stream: bool


class Edges:
    """Counters of one rank. Owned by the executor. streams: name -> (node that fills it, node that takes it).

    A stream is counted where it is read, from its buffers and without a step of its own; a value of a walk that
    crosses to another rank where it is sent.
    """

    def __init__(self, rank: int, streams: Mapping[str, tuple[str, str]]) -> None:
        self._rank = rank
        self._streams = streams
        self._sums: dict[Route, list[float]] = {}
        self._told: dict[Route, EdgeNews] = {}

    def crossed(self, name: str, source: str, into_rank: int, size_bytes: int) -> None:
        """A value of a walk leaves for another rank."""
        route = Route(name, source, "", self._rank, into_rank, False)
        found = self._sums.setdefault(route, [0, 0, 0, 0.0])
        found[0] += 1
        found[1] += size_bytes

    def arrived(self, name: str, source: str, source_rank: int, transfer_s: float) -> None:
        """A value of a walk came from another rank, which counted it; it took so long."""
        route = Route(name, source, "", source_rank, self._rank, False)
        found = self._sums.setdefault(route, [0, 0, 0, 0.0])
        found[2] += 1
        found[3] += transfer_s

    def closed(self, request: WorkerRequest) -> None:
        """A request ends: keep what its streams carried."""
        self._add(self._sums, request)

    def news(self, requests: Iterable[WorkerRequest]) -> list[EdgeNews]:
        """Edges whose counters moved since the last call. requests: those that live now."""
        sums = {route: list(found) for route, found in self._sums.items()}
        for request in requests:
            self._add(sums, request)
        made = []
        for route, (items, size, transfers, transfer_s) in sums.items():
            edge = EdgeNews(*route, int(items), int(size), int(transfers), round(transfer_s, 6))
            if self._told.get(route) != edge:
                self._told[route] = edge
                made.append(edge)
        return made

    def _add(self, sums: dict[Route, list[float]], request: WorkerRequest) -> None:
        for name, inbox in request.inboxes.items():
            if not inbox.received:
                continue
            source, into = self._streams.get(name, ("", ""))
            home = request.homes.get(source, self._rank)
            found = sums.setdefault(Route(name, source, into, home, self._rank, True), [0, 0, 0, 0.0])
            found[0] += inbox.received
            found[1] += inbox.size_bytes
            found[2] += inbox.transfers
            found[3] += inbox.transfer_s
