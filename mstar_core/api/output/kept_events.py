"""Events of streamed responses: their numbers, and those that are kept for clients that reconnect.

An event is a server-sent event, a line or a frame. Each exchange has a log; the service keeps those of requests that
outlive their connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

from mstar_core.api.errors import EventsGone
from mstar_core.errors import Duplicate, RequestError

MIB: Final = 1 << 20
LOG_BYTES: Final = 16 * MIB
"""Most bytes of events that are kept of one request. Older ones are dropped."""

TOTAL_BYTES: Final = 256 * MIB
"""Most bytes of events that are kept of all requests. Those of the request that ended first are dropped first."""

KEEP_S: Final = 60.0
"""Time for which events are kept after the end of their request."""

OVERHEAD_BYTES: Final = 128
"""Memory that a kept event takes beside its bytes."""

EVENTS: Final = "text/event-stream; charset=utf-8"

Data = bytes | memoryview
Event = Sequence[Data]
"""One event, in one or several buffers."""


class EventLog:
    """Events of one response, numbered from 1. content_type: of the response. has_ended: no further event follows.

    is_kept: events are kept for other readers. count: number of the last event. size_bytes: of those that are left.
    """

    def __init__(self) -> None:
        self.content_type = ""
        self.is_kept = self.has_ended = False
        self.count = 0
        self.size_bytes = 0
        self._store: KeptEvents | None = None
        self._first = 1  # number of the first event that is left
        self._events: dict[int, bytes] = {}
        self._news = asyncio.Event()

    def keep(self, store: KeptEvents, content_type: str) -> None:
        """Keep the events that are added from now on."""
        self.is_kept, self.content_type, self._store = True, content_type, store

    def add(self, events: Iterable[Event], *, is_replay: bool = False) -> list[Data]:
        """Add events. Returns the buffers to write.

        Server-sent events that are kept get an `id` field. Others do not, because some clients parse events that have a
        `data` field alone. is_replay: another process has sent them, maybe divided otherwise; `restart` follows.
        """
        buffers: list[Data] = []
        for event in events:
            self.count += 1
            if not self.is_kept:
                buffers += event
                continue
            parts = (b"id: %d\n" % self.count, *event) if self.content_type == EVENTS else event
            buffers += parts
            if not is_replay:
                self._keep(b"".join(parts))
        if self.is_kept:
            self._tell()
        return buffers

    def restart(self, count: int) -> None:
        """Go on after event `count`, which another process has sent."""
        self.count, self._first = count, count + 1

    def end(self) -> None:
        """Note that no further event follows."""
        self.has_ended = True
        self._tell()
        if self._store is not None:
            self._store.ended(self)

    def check(self, after: int) -> None:
        """Raise EventsGone if an event behind number `after` was dropped, RequestError if there was no such event."""
        if after < self._first - 1:
            raise EventsGone(
                f"events before number {self._first} were dropped",
                hint=f"the first event that is left is number {self._first}: use after={self._first - 1}",
                field="after",
            )
        if self.has_ended and after > self.count:
            raise RequestError(
                f"after is {after}, but the request ended with event {self.count}",
                hint="use the number of the last event that was received",
                field="after",
            )

    async def since(self, after: int, keepalive_s: float) -> AsyncIterator[list[bytes]]:
        """Yield the events behind number `after` up to the end, and an empty list after each `keepalive_s` without any.

        Raises EventsGone if the reader is so slow that events are dropped before it has taken them.
        """
        while True:
            self.check(after)
            if after < self.count:
                ready = [self._events[number] for number in range(after + 1, self.count + 1)]
                after = self.count
                yield ready
                continue
            if self.has_ended:
                return
            try:
                async with asyncio.timeout(keepalive_s):
                    await self._news.wait()
            except TimeoutError:
                yield []

    def drop(self, size_bytes: int) -> None:
        """Drop the oldest events until at least so many bytes are free, or no event is left."""
        target, dropped = self.size_bytes - size_bytes, 0
        for number in range(self._first, self.count + 1):
            if self.size_bytes - dropped <= target:
                break
            dropped += len(self._events[number]) + OVERHEAD_BYTES
            del self._events[number]
            self._first += 1
        self._resize(-dropped)

    def _keep(self, event: bytes) -> None:
        self._events[self.count] = event
        self._resize(len(event) + OVERHEAD_BYTES)
        if self.size_bytes > LOG_BYTES:
            self.drop(self.size_bytes - LOG_BYTES)

    def _resize(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        if self._store is not None and size_bytes:
            self._store.resized(self, size_bytes)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class KeptEvents:
    """Logs of requests that outlive their connection, by client id and API key. Owned by the service."""

    def __init__(self, total_bytes: int = TOTAL_BYTES, keep_s: float = KEEP_S) -> None:
        self.size_bytes = 0
        self._total_bytes = total_bytes
        self._keep_s = keep_s
        self._logs: dict[tuple[str, str], EventLog] = {}

    def open(self, request_id: str, key: str, log: EventLog, content_type: str) -> None:
        """Keep the events of a request. Raises Duplicate if those of a running request have its id."""
        self.forget(request_id, key)
        log.keep(self, content_type)
        self._logs[request_id, key] = log

    def forget(self, request_id: str, key: str) -> None:
        """Drop the events of an earlier request with this id. Raises Duplicate if it is running."""
        log = self._logs.get((request_id, key))
        if log is not None and not log.has_ended:
            raise Duplicate(
                "a request with this id is in flight",
                hint="wait for it, cancel it, or use another id",
                field="request_id",
            )
        if log is not None:
            self._remove(log)

    def find(self, request_id: str, key: str) -> EventLog | None:
        """Return the log of a client id, if `key` sent the request and its events are kept."""
        return self._logs.get((request_id, key))

    def ended(self, log: EventLog) -> None:
        """Keep the events of a request for a while after its end."""
        for owner in [each for each, kept in self._logs.items() if kept is log]:
            del self._logs[owner]
            self._logs[owner] = log  # in the order of their ends
        asyncio.get_running_loop().call_later(self._keep_s, self._remove, log)

    def resized(self, log: EventLog, size_bytes: int) -> None:
        """Count bytes of a log, and make room if there are too many."""
        self.size_bytes += size_bytes
        if size_bytes < 0 or self.size_bytes <= self._total_bytes:
            return
        for other in [each for each in self._logs.values() if each.has_ended]:
            self._remove(other)
            if self.size_bytes <= self._total_bytes:
                return
        log.drop(self.size_bytes - self._total_bytes)

    def _remove(self, log: EventLog) -> None:
        for owner in [each for each, kept in self._logs.items() if kept is log]:
            del self._logs[owner]
            self.size_bytes -= log.size_bytes
