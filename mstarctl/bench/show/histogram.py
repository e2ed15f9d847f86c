"""Histogram with buckets of 1 %, for percentiles while a run lasts. Final ones come from raw data."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

RATIO: Final = math.log(1.01)
LEAST: Final = 1e-6


class LiveHistogram:
    """Counts of values in buckets of 1 %. Owned by the live state of a run."""

    def __init__(self) -> None:
        self.count = 0
        self._buckets: Counter[int] = Counter()

    def add(self, value: float) -> None:
        """Count a value; those below 1e-6 share a bucket."""
        self._buckets[round(math.log(max(LEAST, value)) / RATIO)] += 1
        self.count += 1

    def percentile(self, percentile: float) -> float | None:
        """Return a percentile by nearest rank, within 1 %; None without values."""
        rank, seen = max(1, math.ceil(percentile / 100 * self.count)), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return math.exp(bucket * RATIO)
        return None
