"""Clock of the fleet: real, or moved by tests."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Protocol


class Clock(Protocol):
    """Time in seconds, and waits for an event."""

    def now(self) -> float:
        """Return a time that never goes back."""
        ...

    async def wait(self, event: asyncio.Event, limit_s: float | None = None) -> None:
        """Return when the event is set, or after the limit."""
        ...


class MonotonicClock:
    """The clock of this host."""

    def now(self) -> float:
        """Return seconds of the monotonic clock."""
        return time.monotonic()

    async def wait(self, event: asyncio.Event, limit_s: float | None = None) -> None:
        """Return when the event is set, or after the limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await event.wait()
