"""Flow times of an image: the grid, its shift toward noise, and the steps inside the guidance interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mstar_bagel.program import PHASES, until_partial
from mstar_core.families.step_cache import step_groups

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
    """Return the table of Euler steps, float32 [points - 1, 4]: time, length, number and slope length of each.

    A step subtracts length * v + slope length * (v - v of the step before). The slope length is 0 in plain Euler steps.
    """
    times = flow_times(points, shift)
    count = len(times) - 1
    numbers = np.arange(count, dtype=np.float32)
    return np.stack([times[:-1], times[:-1] - times[1:], numbers, np.zeros(count, dtype=np.float32)], axis=1)


def folded(table: np.ndarray, share: float) -> np.ndarray:
    """Return the table of the steps that run a forward pass, each with the steps behind it that extrapolate its v.

    table: Euler steps of one phase, see `steps`. share: of steps without a pass. The number of a folded step is that of
    the last step in it.
    """
    if not share or not len(table):
        return table
    rows = []
    for group in step_groups([float(time) for time in table[:, 0]], share):
        lengths = table[group.first : group.stop, 1].astype(np.float64)
        slope = float(lengths @ np.array(group.weights))
        rows.append((table[group.first, 0], lengths.sum(), table[group.stop - 1, 2], slope))
    return np.array(rows, dtype=np.float32)


def are_guided(times: np.ndarray, guide: Guidance) -> np.ndarray:
    """Return whether each step is guided, bool [n]. The interval is open below and closed above.

    times: float32 [n]. Bounds are compared in float32, as in the reference.
    """
    inside: np.ndarray = (times > np.float32(guide.low)) & (times <= np.float32(guide.high))
    return inside & guide.is_on


def partial_steps(count: int, partial: int) -> list[int]:
    """Return the numbers of steps after which partial images are made, evenly spread over `count` steps."""
    return sorted({round(count * (number + 1) / (partial + 1)) for number in range(partial)} - {0, count})


def phases(
    points: int, shift: float, guide: Guidance, partial: int = 0, step_cache: float = 0.0
) -> dict[str, np.ndarray]:
    """Return the steps before, inside and after the guidance interval, by the program's input names.

    Times fall, so each phase is one run of steps. Empty phases are left out; an image without guidance has one phase.
    partial: number of partial images, which divide phases; see `until_partial`. step_cache: see `folded`.
    """
    cuts, times = partial_steps(points - 1, partial), dict[str, np.ndarray]()
    for phase, every in _phases(points, shift, guide).items():
        part = folded(every, step_cache)
        for number, cut in enumerate(cuts):
            # A folded step is not divided: its partial image comes before it.
            made = int((part[:, 2] < cut).sum())
            if made and (made < len(part) or cut == int(part[-1, 2]) + 1):
                times[until_partial(phase, number)] = part[:made]
                part = part[made:]
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
