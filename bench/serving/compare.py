"""Comparison of two deployments: order of their runs, and ratios of their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def order_of(names: Sequence[str], repeats: int) -> list[str]:
    """Return each name `repeats` times, in alternating direction, so that drift of the machine affects all alike."""
    return [name for number in range(repeats) for name in (names if number % 2 == 0 else reversed(names))]


def ratios(base: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, float]:
    """Return the median of `changed` over that of `base`, for every metric that both have and that is not zero."""
    both = [name for name in base if name in changed and base[name]["p50"]]
    return {name: float(f"{changed[name]['p50'] / base[name]['p50']:.4g}") for name in both}
