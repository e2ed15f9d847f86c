"""Drawn ids on their way to the api, for requests that can go on after a death.

Ids leave in or before the first message of their request that may depend on them, otherwise after INTERVAL_S. Owned by
the outbox, filled by the executor. Cost model: one append per drawn id, and one record per place and message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from time import monotonic
from typing import TYPE_CHECKING, Final

from mstar_core.messages.flow import Drawn

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from mstar_core.graph.compile.compiled import CompiledTask
    from mstar_core.graph.declare.nodes import NodeSpec

INTERVAL_S: Final = 0.25
"""Longest time that an id waits here while no message leaves."""


@dataclass(slots=True)
class PlaceLog:
    """Ids of one loop, or of one node's tasks, that have not been sent. Ids that an attempt was given are left out.

    start: number of the first id in `ids`. ports: outputs whose values follow each drawn id; width: ids of one
    iteration. left_out: given ids that will still be reported. last: the last drawn id, whose values follow.
    """

    journal: PendingDraws
    handle: int
    place: str
    start: int
    ports: tuple[str, ...] = ()
    width: int = 1
    left_out: int = 0
    last: int = 0
    ids: list[int] = field(default_factory=list)

    def drew(self, value: int) -> None:
        """Add a drawn id, or keep it for its values."""
        if self.ports:
            self.last = value
        elif self.left_out:
            self.left_out -= 1
        else:
            self._add((value,))

    def emitted(self, outputs: Mapping[str, Tensor]) -> None:
        """Add the last drawn id with the values of its iteration, which are on the host."""
        if not self.ports:
            return
        if self.left_out:
            self.left_out -= self.width
            return
        self._add((self.last, *(value for port in self.ports for value in outputs[port].reshape(-1).tolist())))

    def _add(self, ids: Sequence[int]) -> None:
        if not self.ids:
            self.journal.add(self)
        self.ids += ids


class PendingDraws:
    """Places with ids that have not been sent."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._waiting: dict[int, list[PlaceLog]] = {}
        self._since = 0.0

    def of_draw(self, handle: int, place: str, start: int, known: Sequence[int]) -> tuple[PlaceLog, int | None]:
        """Return the log of the next draw of a node's tasks, and its id if that is known.

        start: number of that id at its place. known: ids that are given from that one on.
        """
        log = PlaceLog(self, handle, place, start, left_out=len(known[:1]))
        return log, known[0] if known else None

    def of_loop(
        self, handle: int, place: str, start: int, known: Sequence[int], node: NodeSpec, ports: Sequence[str]
    ) -> tuple[PlaceLog, tuple[int, ...]]:
        """Return the log of a loop that begins, and the ids that it is given, in whole iterations.

        start: number of its first id. known: ids that are given from that one on. ports: see NodeRunner.
        """
        width = 1 + sum(prod(map(int, node.port(port).shape)) for port in ports)
        whole = tuple(known[: len(known) // width * width])
        return PlaceLog(self, handle, place, start + len(whole), tuple(ports), width, len(whole)), whole

    def add(self, log: PlaceLog) -> None:
        """Let a place wait that has its first new id."""
        if not self._waiting:
            self._since = self._clock()
        self._waiting.setdefault(log.handle, []).append(log)

    @property
    def is_waiting(self) -> bool:
        """Whether ids have not been sent."""
        return bool(self._waiting)

    @property
    def wait_s(self) -> float:
        """Seconds until waiting ids are due."""
        return max(0.0, self._since + INTERVAL_S - self._clock())

    def take(self, handles: Iterable[int] | None = None) -> list[Drawn]:
        """Return the ids of these requests that wait; all without `handles`."""
        drawn = []
        for handle in list(self._waiting) if handles is None else handles:
            for log in self._waiting.pop(handle, ()):
                drawn.append(Drawn(handle=log.handle, place=log.place, start=log.start, ids=log.ids, width=log.width))
                log.start += len(log.ids)
                log.ids = []
        return drawn


def draws_id(task: CompiledTask, outputs: Collection[str]) -> bool:
    """Return whether a task draws an id that something reads; inside loops, only outputs are read (`outputs`)."""
    sampling = task.node.spec.sampling
    return sampling is not None and (not task.path or sampling.port in outputs)
