"""Who may run: a number of slots and a bounded queue in order of arrival. Owned by the api's service."""

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
"""Ends of requests that the drain rate is taken from."""

UNKNOWN_WAIT_S: Final = 5
LONGEST_WAIT_S: Final = 60


class AdmissionQueue:
    """Places for requests. A place is held from arrival to end; a slot from its turn to its end.

    Invariant: running + waiting + preparing == places held, running <= slots.
    """

    def __init__(
        self, slots: int, queue: int, clock: Callable[[], float] = time.monotonic, *, per_key: int = 0
    ) -> None:
        """per_key: places that one api key may hold at once; 0 is no limit."""
        self.slots = slots
        self.queue = queue
        self.per_key = per_key
        self.running = 0
        self.places = 0
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ends: deque[float] = deque(maxlen=RECENT)

    @property
    def waiting(self) -> int:
        """Requests that hold a place and no slot."""
        return self.places - self.running

    @property
    def is_free(self) -> bool:
        """Whether who comes now gets a slot without waiting for it: then nobody else waits either."""
        return self.running < self.slots

    def check(self, key: str = "", count: int = 1) -> None:
        """Raise Overloaded when `count` places are not left; before a body is read for nothing."""
        if self.per_key and self._held[key] + count > self.per_key:
            raise Overloaded(
                f"the API key may have {self.per_key} requests at once", hint="send it again later",
                retry_after_s=self.retry_after_s(), code="key_limit",
            )  # fmt: skip
        if self.places + count > self.slots + self.queue:
            raise Overloaded(
                "the queue is full",
                hint=f"{self.running} requests run and {self.waiting} wait; send it again later",
                retry_after_s=self.retry_after_s(),
            )

    @contextmanager
    def place(self, key: str = "") -> Iterator[Place]:
        """Take a place for one request. Gives it back, with the slot, however the block ends. Raises Overloaded."""
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
        """Seconds until those who wait now are likely through, from how fast the recent requests ended; 1 to 60."""
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
        while self._waiting and self.running < self.slots:
            turn = self._waiting.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)


class BodyMemory:
    """Bytes of the bodies of all requests together, from their first byte to the end of their answers.

    Owned by the service. Without it a few dozen clients could fill the memory with bodies that are each allowed.
    """

    def __init__(self, limit_bytes: int, retry_after_s: Callable[[], int]) -> None:
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._retry_after_s = retry_after_s

    def take(self, size: int) -> None:
        """Count some bytes. Raises Overloaded, and counts nothing, where they are too many."""
        if self.size_bytes + size > self._limit_bytes:
            raise Overloaded(
                "the bodies of other requests fill the memory for bodies",
                hint=f"{self._limit_bytes >> 20} MiB are held at once; send it again later",
                retry_after_s=self._retry_after_s(),
            )
        self.size_bytes += size

    def give(self, size: int) -> None:
        """Their request is over."""
        self.size_bytes -= size


class Place:
    """One request's place. `run` waits for its turn; `enter` and `leave` may be called any number of times."""

    def __init__(self, admission: AdmissionQueue) -> None:
        self._admission = admission
        self._turn: asyncio.Future[None] | None = None

    def enter(self) -> asyncio.Future[None]:
        """Get in line for a slot, behind those who came before; done at once where one `is_free`."""
        if self._turn is None:
            self._turn = self._admission._enter()
        return self._turn

    async def run(self) -> None:
        """Wait for a slot."""
        await asyncio.shield(self.enter())

    def leave(self) -> None:
        """Give the slot, or the turn in the queue, back."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        if not turn.done():
            turn.cancel()
        elif not turn.cancelled():
            self._admission.running -= 1
        self._admission._admit()
