"""Step cache of flow loops: which steps run a forward pass, and how the others extrapolate their velocity.

Used by processors, which fold the steps without a pass into the table of steps that a loop reads. The schedule depends
on numbers of the request alone, so no step waits for a value of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.errors import ConfigError

MOST_CACHED: Final = 0.8
"""Largest share of steps without a forward pass. Beyond it fewer steps give a better image at the same cost."""

HEAD: Final = 2
"""First steps of a sequence, which are always computed: a line needs two velocities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroup:
    """A step with a forward pass, and the steps behind it that extrapolate its velocity.

    first: number of the computed step. weights: for each step of the group the factor w of v + w (v - v_before), where
    v is the velocity of the computed step and v_before that of the group before. 0 for the computed step itself.
    """

    first: int
    weights: tuple[float, ...]

    @property
    def stop(self) -> int:
        """Number of the step behind the group."""
        return self.first + len(self.weights)


def computed_steps(count: int, share: float) -> list[int]:
    """Return the numbers of the steps that run a forward pass: the first two, the last, and others evenly spread.

    count: steps in the sequence. share: of them, without a pass, in [0, 1).
    """
    wanted = max(round(count * (1 - share)), min(count, HEAD + 1))
    if wanted >= count:
        return list(range(count))
    spread = wanted - HEAD
    return [*range(HEAD), *(HEAD - 1 + round((count - HEAD) * (number + 1) / spread) for number in range(spread))]


def step_groups(times: Sequence[float], share: float) -> list[StepGroup]:
    """Return the groups of a sequence of steps, in order. Velocities are extrapolated on a line through the last two.

    times: flow time of each step, strictly monotone. A sequence is a part of the loop whose velocity changes without a
    jump: where guidance ends, or another network takes over, a new one begins. Its first group extrapolates nothing.
    """
    computed = computed_steps(len(times), share)
    groups: list[StepGroup] = []
    for number, first in enumerate(computed):
        stop = computed[number + 1] if number + 1 < len(computed) else len(times)
        gap = times[first] - times[computed[number - 1]] if number else 1.0  # the first group is one step
        weights = tuple((times[step] - times[first]) / gap for step in range(first, stop))
        groups.append(StepGroup(first=first, weights=weights))
    return groups


def default_share(value: Any) -> float:
    """Return the share that a deployment's option names. Raises ConfigError for anything but a number in its range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_CACHED:
        hint = f"write a number from 0 to {MOST_CACHED}"
        raise ConfigError(f"step_cache is {value!r}", hint=hint, key="model_kwargs.step_cache")
    return float(value)
