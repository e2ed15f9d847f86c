"""Admission queue: concurrency slots, a bounded FIFO queue and a memory budget for bodies. Owned by the service."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mstar_core.errors import Overloaded

RECENT: Final = 32
"""Number of recently finished requests that determine the drain rate."""

UNKNOWN_WAIT_S: Final = 5
LONGEST_WAIT_S: Final = 60


class AdmissionQueue:
    """Slots and queue places of requests. A request holds a place until it ends, and a slot while it runs.

    Invariant: running + waiting + preparing == places held. No request gets a slot while running is not less than
    max_concurrent_requests, or while the queue is paused.
    """

    def __init__(
        self,
        max_concurrent_requests: int,
        max_queue: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        per_key: int = 0,
    ) -> None:
        """per_key: places that one API key may hold at once; 0: no limit."""
        self.max_concurrent_requests = max_concurrent_requests
        self.max_queue = max_queue
        self.per_key = per_key
        self.running = 0
        self.places = 0
        self.is_paused = False
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ends: deque[float] = deque(maxlen=RECENT)

    @property
    def waiting(self) -> int:
        """Return the number of requests that hold a place but no slot."""
        return self.places - self.running

    @property
    def is_free(self) -> bool:
        """Return whether a new request gets a slot immediately; implies that no request waits."""
        return self.running < self.max_concurrent_requests and not self.is_paused

    def limit(self, max_concurrent_requests: int, max_queue: int, per_key: int) -> None:
        """Change the limits. Requests that have a slot or a place keep it."""
        self.max_concurrent_requests, self.max_queue, self.per_key = max_concurrent_requests, max_queue, per_key
        self._admit()

    def pause(self, *, is_paused: bool) -> None:
        """Make new requests wait for a slot, or let them go on."""
        self.is_paused = is_paused
        self._admit()

    def check(self, key: str = "", count: int = 1) -> None:
        """Raise Overloaded if fewer than `count` places are left. Called before the body is read."""
        if self.per_key and self._held[key] + count > self.per_key:
            raise Overloaded(
                f"the API key already has {self.per_key} requests in progress, its limit",
                hint="retry later",
                retry_after_s=self.retry_after_s(),
                code="key_limit",
            )
        if self.places + count > self.max_concurrent_requests + self.max_queue:
            raise Overloaded(
                "the queue is full",
                hint=f"{self.running} requests are running and {self.waiting} are waiting; retry later",
                retry_after_s=self.retry_after_s(),
            )

    @contextmanager
    def place(self, key: str = "") -> Iterator[Place]:
        """Take a place for one request, and release it with its slot at the end of the block. Raises Overloaded."""
        self.check(key)
        self.places += 1
        self._held[key] += 1
        held = Place(self)
        try:
            yield held
        finally:
            held.leave()
            self.places -= 1
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
            self._ends.append(self._clock())

    def retry_after_s(self) -> int:
        """Estimate when the current backlog is done, from the recent drain rate: 1 to 60 seconds."""
        if len(self._ends) < 2:
            return UNKNOWN_WAIT_S
        span = max(self._clock() - self._ends[0], 1e-3)
        return min(LONGEST_WAIT_S, max(1, math.ceil(span / len(self._ends) * (self.waiting + 1))))

    def _enter(self) -> asyncio.Future[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        return turn

    def _admit(self) -> None:
        while self._waiting and self.is_free:
            turn = self._waiting.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)


class BodyMemory:
    """Memory budget for the bodies of all requests, held from their first byte to the end of their responses.

    Owned by the service. A few dozen clients could otherwise exhaust memory with bodies of an allowed size.
    """

    def __init__(self, limit_bytes: int, retry_after_s: Callable[[], int]) -> None:
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._retry_after_s = retry_after_s

    def take(self, size: int) -> None:
        """Reserve some bytes. Raises Overloaded, without reserving, if the budget is exhausted."""
        if self.size_bytes + size > self._limit_bytes:
            raise Overloaded(
                "the memory for request bodies is exhausted",
                hint=f"at most {self._limit_bytes >> 20} MiB are held at once; retry later",
                retry_after_s=self._retry_after_s(),
            )
        self.size_bytes += size

    def give(self, size: int) -> None:
        """Release bytes of a finished request."""
        self.size_bytes -= size


class Place:
    """The place of one request. `enter` and `leave` are idempotent."""

    def __init__(self, admission: AdmissionQueue) -> None:
        self._admission = admission
        self._turn: asyncio.Future[None] | None = None

    def enter(self) -> asyncio.Future[None]:
        """Queue for a slot; the future is done immediately if a slot `is_free`."""
        if self._turn is None:
            self._turn = self._admission._enter()
        return self._turn

    async def run(self) -> None:
        """Wait for a slot."""
        await asyncio.shield(self.enter())

    def leave(self) -> None:
        """Release the slot or the position in the queue."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        if not turn.done():
            turn.cancel()
        elif not turn.cancelled():
            self._admission.running -= 1
        self._admission._admit()
