"""For how long a loop that had something to do looks again without sleeping. One per process, used from its main loop.

A sleeping process is woken by an interrupt to a processor that may be halted too, and finds its caches cold: on the way
of a request of 20 ms that is a noticeable part, for each process that it visits. Cost model: a look takes about a
microsecond, most of it outside the interpreter, so that other threads of the process get that as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Spin:
    """span_s: how long to look on after something of a request came; 0 sleeps at once. Pings and beats rouse nobody."""

    span_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _until: float = 0.0

    def rouse(self) -> None:
        """Something of a request came."""
        if self.span_s:
            self._until = self.clock() + self.span_s

    @property
    def left_s(self) -> float:
        """Seconds for which to look on; 0.0 once that is over."""
        return max(0.0, self._until - self.clock()) if self.span_s else 0.0
