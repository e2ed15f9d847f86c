"""Events out of counters that may rise by thousands: told when they begin, and ever more seldom while they go on.

Preemptions (`kv.preempt`) and refusals (`api.refused`). Owned by the supervisor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.messages.names import rank_of

FIRST_S: Final = 1.0
MOST_S: Final = 60.0
"""Pauses between two events of one storm double from the first to the most: at most some 65 in an hour."""

Event = tuple[str, dict[str, Any]]
Sample = tuple[str, tuple[str, ...]]
"""(name, values of labels) of a metric."""


@dataclass(slots=True)
class ThrottledCounter:
    """One counter, with an amount that goes with it. told: as of the last event; next_s: when another may come."""

    told: int = 0
    told_amount: int = 0
    next_s: float = float("-inf")
    pause_s: float = FIRST_S

    def news(self, count: int, amount: int, now: float) -> tuple[int, int] | None:
        """(how often, how much) since the last event, when it is time for one. A counter that fell has begun anew."""
        if count < self.told:
            self.told = self.told_amount = 0
        if count == self.told or now < self.next_s:
            return None
        goes_on = now < self.next_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, MOST_S) if goes_on else FIRST_S
        self.next_s = now + self.pause_s
        made = count - self.told, max(0, amount - self.told_amount)
        self.told, self.told_amount = count, amount
        return made


@dataclass(slots=True)
class EventThrottle:
    """Every storm by what it is of. name_of: the client's name for a request's handle, empty when it is not known."""

    name_of: Callable[[int], str]
    _throttle: dict[tuple[str, ...], ThrottledCounter] = field(default_factory=dict)

    def look(self, values: Mapping[str, float], refused: Mapping[str, float], now: float) -> Iterator[Event]:
        """Events that are due. values: flat readings of all processes; refused: how many requests by code."""
        for name, value in values.items():
            if value and name.endswith(".preempted"):
                yield from self._preempted(name.removesuffix(".preempted"), values, now)
        for code, count in refused.items():
            found = self._storm("api", code).news(int(count), 0, now)
            if found is not None:
                yield "api.refused", {"code": code, "requests": found[0]}

    def _preempted(self, where: str, values: Mapping[str, float], now: float) -> Iterator[Event]:
        pages = int(values.get(f"{where}.preempted_pages", 0))
        found = self._storm("kv", where).news(int(values[f"{where}.preempted"]), pages, now)
        if found is None:
            return
        process, _, node = where.partition(".")
        requests, taken = found
        facts: dict[str, Any] = {"node": node, "rank": rank_of(process), "pages": taken, "why": "pool full"}
        if requests > 1:
            yield "kv.preempt", {"requests": requests, **facts}
            return
        handle = int(values.get(f"{where}.preempted_last", 0))
        name = self.name_of(handle)
        yield "kv.preempt", {"request": name, **facts} if name else facts

    def _storm(self, *what: str) -> ThrottledCounter:
        return self._throttle.setdefault(what, ThrottledCounter())
