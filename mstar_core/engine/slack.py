"""Device time that other work may take before sound that has begun runs dry.

Sound that a client listens to has a time at which the client has played all of it. Encoders and new prompts yield to
it: they take no more of the device than is left before the next piece of sound must be made. The worker's loop owns a
`Slack` and shares it with its engines.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mstar_core.engine.marks import Mark

MARGIN_S: Final = 0.05
"""Seconds of sound that stay buffered, for the way to the client and errors of the estimate."""

HOLD_LIMIT_S: Final = 1.0
"""Time after which held work runs in any case, the oldest first and one item per step."""

MOST_UNITS: Final = 1 << 62

NEW_SHARE: Final = 0.125
"""Weight of a new measurement in a running mean."""


def no_listener() -> float:
    """Return the slack of a rank without listeners: no limit."""
    return math.inf


def nothing_due() -> bool:
    """Return that no first sound is awaited."""
    return False


@dataclass(slots=True)
class Slack:
    """Seconds that yielding work may take of the device now.

    least_s: seconds until the first listener's next piece of sound must be begun, infinite without listeners.
    is_first_due: returns whether the first sound of a request is awaited, whose ids are wanted one by one. costs: of
    the nodes that yield. is_holding: work was held since the worker cleared this.
    """

    least_s: Callable[[], float] = no_listener
    is_first_due: Callable[[], bool] = nothing_due
    costs: list[StepCost] = field(default_factory=list)
    is_holding: bool = False

    @property
    def in_flight_s(self) -> float:
        """Expected time of yielding work that the device has not finished."""
        return sum([cost.in_flight_s() for cost in self.costs])

    def left_s(self) -> float:
        """Return the seconds that further yielding work may take; infinite without listeners."""
        least = self.least_s()
        return least if least == math.inf else least - MARGIN_S - self.in_flight_s


@dataclass(slots=True)
class TimedWork:
    """Work of one step on the device. end: mark behind it, None while it is launched.

    expected_s: time of its yielding part. steps: decode steps that it holds.
    """

    begin: Mark
    units: int
    expected_s: float
    steps: int = 1
    end: Mark | None = None


@dataclass(slots=True)
class StepCost:
    """Running means of the time of one node's steps: without yielding work, and per unit of it. Measured as they run.

    A unit is a token or an element of an input. Before the first measurement all work costs nothing.
    base_s: seconds of a step without units. added_s, units: of recent steps with units, each step counting less than
    the one after it; their quotient hardly depends on steps of a few units. pending: work whose end has not been seen.
    """

    base_s: float = 0.0
    added_s: float = 0.0
    units: float = 0.0
    pending: deque[TimedWork] = field(default_factory=deque)

    def begin(self, mark: Mark, units: int, yielding: int, steps: int = 1) -> TimedWork:
        """Note that a step begins. units: of all its work; yielding: of that which yields. The caller sets its end.

        steps: decode steps in its launch; 0 for work without one.
        """
        work = TimedWork(mark, units, self.of(yielding), max(1, steps))
        self.pending.append(work)
        return work

    def settle(self) -> None:
        """Take the times of the steps that the device has finished."""
        while self.pending and (end := self.pending[0].end) is not None and end.is_passed:
            work = self.pending.popleft()
            self.add(work.begin.seconds_until(end), work.units, work.steps)

    def settled_s(self) -> float:
        """Return the time of a step without units, by all that the device has finished; 0.0 has none."""
        self.settle()
        return self.base_s

    def in_flight_s(self) -> float:
        """Return the expected time of yielding work that the device has not finished."""
        self.settle()
        return sum([work.expected_s for work in self.pending])

    def add(self, seconds: float, units: int, steps: int = 1) -> None:
        """Take the time of a step with so many units. steps: decode steps in its launch."""
        if not units:
            self.base_s = mean(self.base_s, seconds / steps)
        else:
            self.added_s += max(0.0, seconds - self.base_s * steps) - NEW_SHARE * self.added_s
            self.units += units - NEW_SHARE * self.units

    def of(self, units: int) -> float:
        """Return the expected seconds that so many units add to a step."""
        return units * self.added_s / self.units if self.units else 0.0

    def units_within(self, seconds: float) -> int:
        """Return the units that are expected to take no longer."""
        if seconds <= 0:
            return 0
        return int(min(seconds * self.units / self.added_s, MOST_UNITS)) if self.added_s else MOST_UNITS


def mean(before: float, new: float) -> float:
    """Return a running mean with a new value; 0.0 has no values yet."""
    return before + NEW_SHARE * (new - before) if before else new
