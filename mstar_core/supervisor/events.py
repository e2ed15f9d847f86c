"""Life-cycle events of a deployment: a numbered feed, and a throttle for events that come in bursts."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mstar_core.messages.names import rank_of

RING: Final = 2000
PAUSE_MIN_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0
"""The pause between two events of one counter doubles from the least to the most: about 65 events in the first hour."""

log = logging.getLogger(__name__)


class Events:
    """Records events in memory for clients and in a file. Owned by the supervisor. on_event: called with each event."""

    def __init__(self, path: Path | None, on_event: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.ring: deque[dict[str, Any]] = deque(maxlen=RING)
        self.number = 0
        self._path = path
        self._on_event = on_event
        self._changed = asyncio.Event()

    def add(self, kind: str, **facts: Any) -> None:
        """Record one event: its type and plain facts."""
        self.number += 1
        event = {"n": self.number, "time": round(time.time(), 3), "type": kind, **facts}
        self.ring.append(event)
        if self._on_event is not None:
            self._on_event(event)
        shown = (f"{key}={_plain(value)}" for key, value in facts.items() if value not in (None, "", 0))
        log.info("%s", " ".join((kind, *shown)))
        if self._path is not None:
            with suppress(OSError), self._path.open("a") as file:
                file.write(json.dumps(event, default=str) + "\n")
        self._changed.set()
        self._changed = asyncio.Event()

    def since(self, number: int) -> list[dict[str, Any]]:
        """Return the events after `number`, oldest first."""
        return [event for event in self.ring if event["n"] > number]

    async def wait(self) -> None:
        """Wait for the next event."""
        await self._changed.wait()


def _plain(value: Any) -> str:
    """Format a fact for a log line: mappings and lists without brackets."""
    if isinstance(value, dict):
        return ",".join(f"{key}:{part}" for key, part in value.items())
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# -- bursts -------------------------------------------------------------------------------------------------------

Event = tuple[str, dict[str, Any]]
"""(type, facts) of an event to record."""


@dataclass(slots=True)
class ThrottledCounter:
    """A counter with an amount. reported: the count of its last event; next_s: when the next one is allowed."""

    reported: int = 0
    reported_amount: int = 0
    next_s: float = float("-inf")
    pause_s: float = PAUSE_MIN_S

    def increase(self, count: int, amount: int, now: float) -> tuple[int, int] | None:
        """Return the increase of count and amount since the last event, or None until an event is due.

        A counter that fell was restarted with its process.
        """
        if count < self.reported:
            self.reported = self.reported_amount = 0
        if count == self.reported or now < self.next_s:
            return None
        is_ongoing = now < self.next_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, PAUSE_MAX_S) if is_ongoing else PAUSE_MIN_S
        self.next_s = now + self.pause_s
        increase = count - self.reported, max(0, amount - self.reported_amount)
        self.reported, self.reported_amount = count, amount
        return increase


@dataclass(slots=True)
class EventThrottle:
    """Makes `kv.preempt` and `api.refused` events from counters, rarer the longer a burst lasts.

    name_of: the client's name for a request's handle, empty if unknown.
    """

    name_of: Callable[[int], str]
    _counters: dict[tuple[str, ...], ThrottledCounter] = field(default_factory=dict)

    def due(self, values: Mapping[str, float], refused: Mapping[str, float], now: float) -> Iterator[Event]:
        """Yield the events that are due. values: flat readings of all processes; refused: requests by code."""
        for name, value in values.items():
            if value and name.endswith(".preempted"):
                yield from self._preempted(name.removesuffix(".preempted"), values, now)
        for code, count in refused.items():
            increase = self._counter("api", code).increase(int(count), 0, now)
            if increase is not None:
                yield "api.refused", {"code": code, "requests": increase[0]}

    def _preempted(self, where: str, values: Mapping[str, float], now: float) -> Iterator[Event]:
        pages = int(values.get(f"{where}.preempted_pages", 0))
        increase = self._counter("kv", where).increase(int(values[f"{where}.preempted"]), pages, now)
        if increase is None:
            return
        process, _, node = where.partition(".")
        requests, taken = increase
        facts: dict[str, Any] = {"node": node, "rank": rank_of(process), "pages": taken, "why": "pool full"}
        if requests > 1:
            yield "kv.preempt", {"requests": requests, **facts}
            return
        name = self.name_of(int(values.get(f"{where}.preempted_last", 0)))
        yield "kv.preempt", {"request": name, **facts} if name else facts

    def _counter(self, *key: str) -> ThrottledCounter:
        return self._counters.setdefault(key, ThrottledCounter())
