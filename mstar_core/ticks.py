"""Common times of periodic work: what is due in the same second wakes a process, and the processes of a host, once."""

from __future__ import annotations

import asyncio
import time
from typing import Final

LEAST: Final = 0.1
"""Least time to the next tick, in periods: a timer that runs early or late does not run twice."""


def next_tick(now: float, period_s: float) -> float:
    """Return the next multiple of a period on the monotonic clock, `LEAST` to 1 + `LEAST` periods after `now`."""
    left_s = period_s - now % period_s
    return now + left_s + (period_s if left_s < LEAST * period_s else 0.0)


async def sleep_to_tick(period_s: float) -> None:
    """Sleep until the next tick of a period."""
    now = time.monotonic()
    await asyncio.sleep(next_tick(now, period_s) - now)
