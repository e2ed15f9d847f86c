"""Statistics of samples: percentiles by nearest rank with censored values. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    Values = np.ndarray[Any, np.dtype[np.float64]]

PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0, 99.9)
RESAMPLES: Final = 10_000
CONFIDENCE: Final = 0.95
SEED: Final = 20_240


def least_samples(percentile: float) -> int:
    """Return the samples that a percentile needs to be more than indicative: 10 / (1 - p)."""
    return round(10 / (1 - percentile / 100))


def nearest_rank(ordered: Values, percentile: float) -> float:
    """Return a percentile of sorted values by nearest rank: the smallest value that p percent do not exceed."""
    rank = max(1, math.ceil(percentile / 100 * len(ordered) - 1e-9))
    return float(ordered[rank - 1])


def name_of(percentile: float) -> str:
    """Return `p50` or `p99.9`."""
    return f"p{percentile:g}"


def spread(values: Sequence[float], censored: Sequence[float] = ()) -> dict[str, Any]:
    """Return percentiles, extremes, mean and n of a metric.

    censored: ages of requests that were cut, whose values are longer than these. A percentile that falls among or
    beyond the shortest of them is listed in `over`: its value is a lower limit.
    """
    ordered = np.sort(np.array([*values, *censored], np.float64))
    if not len(ordered):
        return {"n": 0}
    shortest = min(censored, default=math.inf)
    named = {name_of(p): nearest_rank(ordered, p) for p in PERCENTILES}
    over = [name for name, value in named.items() if value >= shortest]
    few = [name_of(p) for p in PERCENTILES if len(ordered) < least_samples(p)]
    rounded = {name: float(f"{value:.6g}") for name, value in named.items()}
    return {
        "n": len(ordered),
        "mean": float(f"{ordered.mean():.6g}"),
        "min": float(f"{ordered[0]:.6g}"),
        **rounded,
        "max": float(f"{ordered[-1]:.6g}"),
        **({"over": over} if over else {}),
        "few": few,
    }
