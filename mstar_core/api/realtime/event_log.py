"""Events of a session on their way to its client, numbered and kept for a while, so that another connection goes on."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from mstar_core.api.errors import EventsGone
from mstar_core.errors import RequestError

KEPT_BYTES: Final = 8 << 20
"""Most bytes of sent events that a new connection may read again."""

KEPT_S: Final = 60.0
"""Time for which events are kept after a connection has taken them.

It exceeds the 40 s after which a connection without a pong is closed: an older event of an open connection has arrived.
"""

WAITING_BYTES: Final = 4 << 20
"""Events that the client has not read, at which responses wait."""


class SentEvents:
    """Events by number, from 1. Owned by the session; one connection reads at a time.

    kept_bytes: of all events that are left. waiting_bytes: of those that no connection has taken.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._clock = clock
        self._kept: deque[tuple[int, bytes]] = deque()
        self._read = 0  # number of the last event that a connection has taken
        self._taken: deque[float] = deque()  # when each kept event up to `_read` was taken
        self.kept_bytes = 0
        self.waiting_bytes = 0
        self._news = asyncio.Event()
        self._done = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def add(self, event: bytes) -> None:
        """Append the next event."""
        self.count += 1
        self._kept.append((self.count, event))
        self.kept_bytes += len(event)
        self.waiting_bytes += len(event)
        while self.kept_bytes > KEPT_BYTES and self._taken:
            self._forget_first()
        if self.waiting_bytes > WAITING_BYTES:
            self._room.clear()
        self._done.clear()
        self._news.set()

    async def next(self) -> bytes:
        """Return the next event for the connection, and count it as read."""
        while self._read >= self.count:
            self._done.set()
            self._news.clear()
            await self._news.wait()
        self.forget_received()
        first = self._kept[0][0]
        self._read += 1
        self._taken.append(self._clock())
        event = self._kept[self._read - first][1]
        self.waiting_bytes -= len(event)
        if self.waiting_bytes <= WAITING_BYTES:
            self._room.set()
        return event

    async def all_read(self) -> None:
        """Wait until a connection has taken every event."""
        await self._done.wait()

    async def has_room(self) -> None:
        """Wait while too much waits for the client."""
        await self._room.wait()

    def rewind(self, number: int) -> None:
        """Let the next connection begin behind the event `number`. Raises RequestError, EventsGone."""
        if not 0 <= number <= self.count:
            raise RequestError(
                f"after is {number}, but the session has sent {self.count} events",
                field="after",
                allowed=f"<= {self.count}",
            )
        first = self._kept[0][0] if self._kept else self.count + 1
        if number < first - 1:
            raise EventsGone(
                f"the events up to {first - 1} are no longer kept", hint="begin a new session", field="after"
            )
        self._read = number
        taken = max(0, number - first + 1)
        self._taken = deque([*self._taken][:taken])
        self._taken.extend([self._clock()] * (taken - len(self._taken)))  # a client may name events that were not sent
        self.waiting_bytes = sum(len(event) for place, event in self._kept if place > number)
        if self.waiting_bytes <= WAITING_BYTES:
            self._room.set()

    def forget_received(self) -> None:
        """Drop the events that the client must have received. Called while a connection is served."""
        oldest = self._clock() - KEPT_S
        while self._taken and self._taken[0] < oldest:
            self._forget_first()

    def clear(self) -> None:
        """Drop all events, after the end of the session."""
        self._kept.clear()
        self._taken.clear()
        self._read = self.count
        self.kept_bytes = self.waiting_bytes = 0
        self._room.set()

    def _forget_first(self) -> None:
        self._taken.popleft()
        self.kept_bytes -= len(self._kept.popleft()[1])
