"""Rates from counters, and quantiles over the last minute. Pure; times are given."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

WINDOW_S: Final = 1.0
MINUTE_S: Final = 60.0
MOST: Final = 4096


class Rate:
    """How fast a counter grows. Owned by whoever reads the counter now and then."""

    __slots__ = ("_samples", "_window_s")

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque()

    def at(self, t: float, value: float) -> float:
        """Growth per second over about the window that ends now; 0.0 before there are two looks at it.

        A counter that fell has begun anew, and so does its rate.
        """
        samples = self._samples
        if samples and value < samples[-1][1]:
            samples.clear()
        if len(samples) > 1 and t - samples[-2][0] < self._window_s / 20:
            samples[-1] = (t, value)  # however often somebody looks, a window has at most some twenty samples
        else:
            samples.append((t, value))
        while len(samples) > 2 and samples[1][0] <= t - self._window_s:
            samples.popleft()
        since, first = samples[0]
        return (value - first) / (t - since) if t > since else 0.0


class Minute:
    """Values of the last minute, at most a few thousand. Owned by the request log."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST)

    def add(self, t: float, value: float) -> None:
        """Note a value."""
        self._values.append((t, value))

    def quantiles(self, t: float, *shares: float) -> tuple[float | None, ...]:
        """The values at these shares of the sorted minute; None for each without any."""
        values = self._values
        while values and values[0][0] < t - MINUTE_S:
            values.popleft()
        return quantiles((value for _, value in values), *shares)


def quantiles(values: Iterable[float], *shares: float) -> tuple[float | None, ...]:
    """Nearest-rank quantiles, None for each when there are no values. shares: 0 to 1."""
    ordered = sorted(values)
    if not ordered:
        return tuple(None for _ in shares)
    last = len(ordered) - 1
    return tuple(ordered[min(last, round(share * last))] for share in shares)
