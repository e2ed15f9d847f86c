"""A clock for runs that must be repeatable. Owned by a bench; everything that asks for the time asks it."""

from __future__ import annotations

from typing import Final

TICK_S: Final = 1e-4
"""What one look at the clock costs: time passes with work alone, so that shares of it are the same in every run."""


class TickingClock:
    """Goes on a little with each look, and by leaps when told to."""

    def __init__(self) -> None:
        self._now_s = 1.0

    def __call__(self) -> float:
        self._now_s += TICK_S
        return self._now_s

    def leap(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds
