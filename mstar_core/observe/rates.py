"""Rates of counters, and quantiles over the last minute. All times are arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

WINDOW_S: Final = 1.0
MINUTE_S: Final = 60.0
MOST: Final = 4096


class Rate:
    """Growth rate of a counter, from periodic readings."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()

    def at(self, t: float, value: float) -> float:
        """Add a reading and return the growth per second over the window that ends now; 0.0 for the first reading.

        A counter that fell was reset, which restarts its rate.
        """
        samples = self._samples
        if samples and value < samples[-1][1]:
            samples.clear()
        if len(samples) > 1 and t - samples[-2][0] < WINDOW_S / 20:
            samples[-1] = (t, value)  # frequent readings add at most about 20 samples per window
        else:
            samples.append((t, value))
        while len(samples) > 2 and samples[1][0] <= t - WINDOW_S:
            samples.popleft()
        since, first = samples[0]
        return (value - first) / (t - since) if t > since else 0.0


class Minute:
    """Values of the last minute, at most 4096. Owned by the request log."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST)

    def add(self, t: float, value: float) -> None:
        """Add a value."""
        self._values.append((t, value))

    def quantiles(self, t: float, *shares: float) -> tuple[float | None, ...]:
        """Return the quantiles at these shares, None for each without values."""
        values = self._values
        while values and values[0][0] < t - MINUTE_S:
            values.popleft()
        return quantiles((value for _, value in values), *shares)


def quantiles(values: Iterable[float], *shares: float) -> tuple[float | None, ...]:
    """Return nearest-rank quantiles, None for each without values. shares: 0 to 1."""
    ordered = sorted(values)
    if not ordered:
        return tuple(None for _ in shares)
    last = len(ordered) - 1
    return tuple(ordered[min(last, round(share * last))] for share in shares)
