"""Flow times of an image: the grid, its shift toward noise, and the steps inside the guidance interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mstar_bagel.program import PHASES, until_partial

if TYPE_CHECKING:
    from mstar_bagel.params import Guidance


def flow_times(points: int, shift: float) -> np.ndarray:
    """Return the flow times of a grid, float32 [points], from 1 to 0. shift: above 1 they lie closer to noise.

    Source: the specification, section 8.
    """
    linear = np.linspace(1.0, 0.0, points, dtype=np.float64).astype(np.float32)
    warp = np.float32(shift)
    times: np.ndarray = warp * linear / (np.float32(1) + (warp - np.float32(1)) * linear)
    return times


def steps(points: int, shift: float) -> np.ndarray:
    """Return time, length and number of each Euler step, float32 [points - 1, 3]."""
    times = flow_times(points, shift)
    return np.stack([times[:-1], times[:-1] - times[1:], np.arange(len(times) - 1, dtype=np.float32)], axis=1)


def are_guided(times: np.ndarray, guide: Guidance) -> np.ndarray:
    """Return whether each step is guided, bool [n]. The interval is open below and closed above.

    times: float32 [n]. Bounds are compared in float32, as in the reference.
    """
    inside: np.ndarray = (times > np.float32(guide.low)) & (times <= np.float32(guide.high))
    return inside & guide.is_on


def partial_steps(count: int, partial: int) -> list[int]:
    """Return the numbers of steps after which partial images are made, evenly spread over `count` steps."""
    return sorted({round(count * (number + 1) / (partial + 1)) for number in range(partial)} - {0, count})


def phases(points: int, shift: float, guide: Guidance, partial: int = 0) -> dict[str, np.ndarray]:
    """Return the steps before, inside and after the guidance interval, by the program's input names.

    Times fall, so each phase is one run of steps. Empty phases are left out; an image without guidance has one phase.
    partial: number of partial images, which divide phases; see `until_partial`.
    """
    cuts, times = partial_steps(points - 1, partial), dict[str, np.ndarray]()
    for phase, part in _phases(points, shift, guide).items():
        first = int(part[0, 2])
        for number, cut in enumerate(cuts):
            if first < cut <= int(part[-1, 2]) + 1:
                times[until_partial(phase, number)] = part[: cut - first]
                part, first = part[cut - first :], cut
        if len(part):
            times[phase] = part
    return times


def _phases(points: int, shift: float, guide: Guidance) -> dict[str, np.ndarray]:
    every = steps(points, shift)
    guided = are_guided(every[:, 0], guide)
    if not guided.any():
        return {PHASES[-1]: every}
    first, end = int(guided.argmax()), len(guided) - int(guided[::-1].argmax())
    parts = dict(zip(PHASES, (every[:first], every[first:end], every[end:]), strict=True))
    return {name: part for name, part in parts.items() if len(part)}
