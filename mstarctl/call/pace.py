"""Control loop of `call --rate`: one request per tick at a fixed rate, with a count of missed deadlines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mstar_core.errors import MstarError


@dataclass(slots=True, kw_only=True)
class Paced:
    """Result of a control loop. Times in seconds. The answer of a tick is due before the next tick.

    late: answers that arrived after the next tick. skipped: ticks without a request, because another was in flight.
    errors: failed requests by code. gap_s: the longest time between two answers.
    """

    rate_hz: float
    latencies_s: list[float] = field(default_factory=list)
    late: int = 0
    skipped: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    gap_s: float = 0.0
    total_s: float = 0.0

    @property
    def ticks(self) -> int:
        """Number of ticks so far."""
        return self.sent + self.skipped

    @property
    def sent(self) -> int:
        return len(self.latencies_s) + self.failed

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    @property
    def missed(self) -> int:
        """Number of deadlines without an answer in time."""
        return self.late + self.skipped + self.failed

    def quantile_s(self, share: float) -> float | None:
        """Return a quantile of the latency (nearest rank); None without answers."""
        ordered = sorted(self.latencies_s)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def keep_pace(
    rate_hz: float,
    ticks: int,
    send: Callable[[int], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    show: Callable[[Paced], None] = lambda paced: None,
) -> Paced:
    """Send at every tick unless a request is in flight: a robot has one state, so requests never overlap.

    send: takes the number of ticks without a request since the previous one.
    A failure of the first request is raised, because repeating it measures nothing. Later failures are counted.
    """
    paced, period = Paced(rate_hz=rate_hz), 1.0 / rate_hz
    begun = answered = clock()
    tick = skipped = 0
    while tick < ticks:
        due = begun + tick * period
        if clock() < due:
            sleep(due - clock())
        sent = clock()
        try:
            send(skipped)
        except MstarError as error:
            if not paced.latencies_s:
                raise
            paced.errors[error.code] = paced.errors.get(error.code, 0) + 1
        else:
            now = clock()
            if paced.latencies_s:
                paced.gap_s = max(paced.gap_s, now - answered)
            paced.latencies_s.append(now - sent)
            paced.late += now > due + period
            answered = now
        paced.total_s = clock() - begun
        following = max(tick + 1, math.ceil(paced.total_s / period))
        skipped = min(following, ticks) - tick - 1
        paced.skipped += skipped
        tick = following
        show(paced)
    return paced
