"""States into the model's units and actions out of them, in float64. Used by the processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mstar_pi05.robots.statistics import Moments

Values = npt.NDArray[np.float64]


def normalise(values: Values, moments: Moments) -> Values:
    """values: [..., n], n at most the statistics' length. Returns the same shape; not clipped."""
    low, divisor = _terms(moments, values.shape[-1])
    scaled: Values = (values - low) / divisor
    return scaled if moments.span == "spread" else scaled * 2.0 - 1.0


def unnormalise(values: Values, moments: Moments) -> Values:
    """The reverse on the first values of the last axis.

    Those past the statistics' length stay as they are in a range, and have mean 0 and deviation 1 in a spread.
    """
    count = min(values.shape[-1], len(moments))
    low, divisor = _terms(moments, count)
    known, rest = values[..., :count], values[..., count:]
    if moments.span == "spread":
        return np.concatenate([known * divisor + low, rest * (1.0 + moments.epsilon)], axis=-1)
    return np.concatenate([(known + 1.0) / 2.0 * divisor + low, rest], axis=-1)


def _terms(moments: Moments, count: int) -> tuple[Values, Values]:
    """What is subtracted, and what is divided by."""
    low, high = (np.array(values[:count], dtype=np.float64) for values in (moments.low, moments.high))
    width = high if moments.span == "spread" else high - low
    if moments.adds:
        return low, width + moments.epsilon
    return low, np.where(width == 0, moments.epsilon, width)
