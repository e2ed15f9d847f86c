"""Busy-polling window of a main loop after a request's message.

A sleeping process is woken by an interrupt and finds its caches cold, which is a noticeable part of a request of 20 ms
in each process on its path. Cost model: a poll takes about a microsecond, most of it without the interpreter lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


def spin_then_block(
    look: Callable[[float | None], T], timeout_s: float | None, spin_s: float, clock: Callable[[], float]
) -> T:
    """Poll without blocking for `spin_s`, then block for the rest of the timeout. Return the first true result.

    look: called with the seconds that it may block, 0 to return at once and None without a limit. The result of the
    last call is returned if none is true.
    """
    begun = clock()
    end = begun + (spin_s if timeout_s is None else min(spin_s, timeout_s))
    while (now := clock()) < end:  # each look releases the interpreter lock
        if message := look(0.0):
            return message
    return look(None if timeout_s is None else max(0.0, timeout_s - (now - begun)))


@dataclass(slots=True)
class Spin:
    """Spin window of one process. span_s: its length; 0: no spinning. Heartbeats and `Reconcile` do not restart it."""

    span_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _until: float = 0.0

    def rouse(self) -> None:
        """Restart the window."""
        if self.span_s:
            self._until = self.clock() + self.span_s

    @property
    def left_s(self) -> float:
        """Seconds until the window expires."""
        return max(0.0, self._until - self.clock()) if self.span_s else 0.0
