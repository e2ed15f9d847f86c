"""Statistics of samples: percentiles by nearest rank with censored values, and bootstrap intervals. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    found = np.sort(np.array([*values, *censored], np.float64))
    if not len(found):
        return {"n": 0}
    shortest = min(censored, default=math.inf)
    named = {name_of(p): nearest_rank(found, p) for p in PERCENTILES}
    over = [name for name, value in named.items() if value >= shortest]
    few = [name_of(p) for p in PERCENTILES if len(found) < least_samples(p)]
    rounded = {name: float(f"{value:.6g}") for name, value in named.items()}
    return {
        "n": len(found), "mean": float(f"{found.mean():.6g}"), "min": float(f"{found[0]:.6g}"), **rounded,
        "max": float(f"{found[-1]:.6g}"), **({"over": over} if over else {}), "few": few,
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Relative difference of B to A with its interval, as fractions of A: 0.1 is 10 % more."""

    difference: float
    low: float
    high: float


def bootstrap(
    groups_a: Sequence[Values],
    groups_b: Sequence[Values],
    figure: Callable[[Values], float],
    *,
    is_paired: bool,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the interval of figure(B) / figure(A) - 1 by resampling whole groups (runs, or blocks of time).

    Requests of one run share a queue, so single requests are not resampled. is_paired: both sides have the same
    schedule, and the same groups are drawn from both.
    """
    base, changed = figure(np.concatenate(groups_a)), figure(np.concatenate(groups_b))
    if not base:
        return Interval(difference=0.0 if not changed else math.inf, low=-math.inf, high=math.inf)
    chance = np.random.default_rng(SEED)
    drawn_a = chance.integers(0, len(groups_a), (resamples, len(groups_a)))
    drawn_b = drawn_a if is_paired else chance.integers(0, len(groups_b), (resamples, len(groups_b)))
    found = np.empty(resamples)
    for number in range(resamples):
        a = figure(np.concatenate([groups_a[i] for i in drawn_a[number]]))
        b = figure(np.concatenate([groups_b[i] for i in drawn_b[number]]))
        found[number] = b / a - 1 if a else 0.0
    tail = 100 * (1 - CONFIDENCE) / 2
    return Interval(
        difference=changed / base - 1, low=float(np.percentile(found, tail)),
        high=float(np.percentile(found, 100 - tail)),
    )  # fmt: skip
