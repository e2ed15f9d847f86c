"""Denoise steps as a table of numbers: noise levels, timesteps, and the solver's coefficients. Standard library, numpy.

Source: the model's specification, section 6. The solver is UniPC of order 2 with `bh2`, which predicts data.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from mstar_core.families.step_cache import step_groups
from mstar_wan22.checkpoint.config import TRAINED_STEPS

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Table = npt.NDArray[np.float32]

Value = TypeVar("Value", "Tensor", "npt.NDArray[np.float64]")

LEAST: Final = 1e-3
"""Least share of the noise of a grid before it is shifted."""

FULL_NOISE: Final = 1e-6
"""A level of 1 is lowered by so much, because its logarithm of the data's share is infinite."""


class Column(enum.IntEnum):
    """Columns of the table of steps. The solver's are factors of tensors, see `nodes.solver`."""

    TIME = 0
    SCALE = 1
    NUMBER = 2
    TOTAL = 3
    SIGMA = 4
    FIX_X = 5
    FIX_LAST = 6
    FIX_OLDER = 7
    FIX_OLDEST = 8
    FIX_DATA = 9
    GO_X = 10
    GO_DATA = 11
    GO_OLDER = 12


FOLDED_OUTPUTS: Final = 4
"""Values behind a folded step: x, the corrected x, and the data of the last step and of the step before it."""

FOLDED_INPUTS: Final = 6
"""Values before a folded step: x, the three of the solver's history, this velocity, and that of the computed step
before."""


def sigmas(steps: int, shift: float, grid: str = "diffusers") -> Table:
    """Return the noise levels of all steps and 0 behind them: float32 [steps + 1]. grid: one of GRIDS."""
    return np.append(_levels(steps, shift, grid), 0.0).astype(np.float32)


def timesteps(steps: int, shift: float, grid: str = "diffusers") -> npt.NDArray[np.int64]:
    """Return the timestep of each step, truncated: int64 [steps]."""
    return (_levels(steps, shift, grid) * TRAINED_STEPS).astype(np.int64)


def _levels(steps: int, shift: float, grid: str) -> npt.NDArray[np.float64]:
    first, last = (1.0, LEAST) if grid == "diffusers" else (1 - LEAST, 0.0)
    levels: npt.NDArray[np.float64] = _shifted(np.linspace(first, last, steps + 1, dtype=np.float64)[:-1], shift)
    if abs(levels[0] - 1) < FULL_NOISE:
        levels[0] -= FULL_NOISE
    return levels


def _shifted(share: Any, shift: float) -> Any:
    return shift * share / (1 + (shift - 1) * share)


def euler_sigmas(steps: int, shift: float) -> Table:
    """Return the noise levels of Euler steps and 0 behind them: float32 [steps + 1]. Timesteps are 1000 of each."""
    levels = _shifted(np.linspace(1.0, _shifted(LEAST, shift), steps, dtype=np.float64), shift)
    return np.append(levels, 0.0).astype(np.float32)


def step_table(
    steps: int, shift: float, scales: tuple[float, float], boundary: float | None, grid: str, solver: str
) -> tuple[Table, int]:
    """Return the table of all steps, float32 [steps, columns], and how many of them the first expert runs.

    scales: guidance of the first and of the second expert. boundary: share of the noise from which the first expert
    runs; None: it runs all steps.
    """
    if solver == "euler":
        levels = euler_sigmas(steps, shift)
        times = levels[:-1] * TRAINED_STEPS
        rows = [_euler(levels, number) for number in range(steps)]
    else:
        levels = sigmas(steps, shift, grid)
        times = timesteps(steps, shift, grid).astype(np.float32)
        rows = [_unipc([float(level) for level in levels], number) for number in range(steps)]
    first = steps if boundary is None else int((times >= boundary * TRAINED_STEPS).sum())
    table = np.zeros((steps, len(Column)), dtype=np.float32)
    for number, row in enumerate(rows):
        table[number, Column.TIME] = times[number]
        table[number, Column.SCALE] = scales[0] if number < first else scales[1]
        table[number, Column.NUMBER], table[number, Column.TOTAL] = number, steps
        for column, value in row.items():
            table[number, column] = value
    return table, first


def folded(table: Table, share: float) -> Table:
    """Return the steps that run a forward pass, each with the steps behind it whose velocity is extrapolated.

    table: steps of one expert, see `step_table`; share: of them, without a pass. Returns float32 [computed steps,
    columns + FOLDED_OUTPUTS * FOLDED_INPUTS]; number and noise level are those of the last step of each, the timestep
    that of the first. Steps of the solver are linear in their inputs, so several together are a matrix, the columns
    behind those of `Column`.
    """
    rows = []
    for group in step_groups([float(level) for level in table[:, Column.SIGMA]], share):
        own = table[group.first : group.stop].astype(np.float64)
        row = own[-1].copy()
        row[Column.TIME] = own[0, Column.TIME]
        x, last, older, oldest, velocity, before = np.eye(FOLDED_INPUTS)
        values = (x, last, older, oldest)
        for step, weight in zip(own, group.weights, strict=True):
            values = solver_step(*values, velocity + weight * (velocity - before), list(step))
        rows.append(np.concatenate([row, *values]))
    return np.array(rows, dtype=np.float32)


def solver_step(
    x: Value, last: Value, older: Value, oldest: Value, velocity: Value, factor: Sequence[float]
) -> tuple[Value, Value, Value, Value]:
    """Return x, the corrected x, and the data of this step and of the step before it, behind one step.

    last: corrected x of the step before. older, oldest: data of the last two steps. factor: the columns of a step.
    """
    data = x - factor[Column.SIGMA] * velocity
    fixed = (
        factor[Column.FIX_X] * x
        + factor[Column.FIX_LAST] * last
        + factor[Column.FIX_OLDER] * older
        + factor[Column.FIX_OLDEST] * oldest
        + factor[Column.FIX_DATA] * data
    )
    following = factor[Column.GO_X] * fixed + factor[Column.GO_DATA] * data + factor[Column.GO_OLDER] * older
    return following, fixed, data, older


def _euler(levels: Table, number: int) -> dict[Column, float]:
    """Return the factors of x + (next - level) v, written with the data x - level v."""
    level, following = float(levels[number]), float(levels[number + 1])
    ratio = following / level
    return {Column.SIGMA: level, Column.FIX_X: 1.0, Column.GO_X: ratio, Column.GO_DATA: 1 - ratio}


def _unipc(levels: Sequence[float], number: int) -> dict[Column, float]:
    return {Column.SIGMA: levels[number], **_corrector(levels, number), **_predictor(levels, number)}


def _corrector(levels: Sequence[float], number: int) -> dict[Column, float]:
    """Return the factors that replace x by a better value, once the data at its place is known."""
    if number == 0:
        return {Column.FIX_X: 1.0}
    h = _log_ratio(levels[number]) - _log_ratio(levels[number - 1])
    change = math.expm1(-h)
    share = (1 - levels[number]) * change
    factors = {Column.FIX_LAST: levels[number] / levels[number - 1]}
    if _order(len(levels) - 1, number - 1) == 1:
        return {**factors, Column.FIX_OLDER: -share / 2, Column.FIX_DATA: -share / 2}
    r = (_log_ratio(levels[number - 2]) - _log_ratio(levels[number - 1])) / h
    k_1 = change / -h - 1
    k_2 = k_1 / -h - 0.5
    b_1, b_2 = k_1 / change, 2 * k_2 / change
    rho_1 = (b_1 - b_2) / (1 - r)
    rho_2 = b_1 - rho_1
    return {
        **factors,
        Column.FIX_OLDEST: -share * rho_1 / r,
        Column.FIX_OLDER: -share * (1 - rho_1 / r - rho_2),
        Column.FIX_DATA: -share * rho_2,
    }


def _predictor(levels: Sequence[float], number: int) -> dict[Column, float]:
    """Return the factors of the value at the next level."""
    steps = len(levels) - 1
    if number == steps - 1:
        return {Column.GO_DATA: 1.0}
    h = _log_ratio(levels[number + 1]) - _log_ratio(levels[number])
    share = (1 - levels[number + 1]) * math.expm1(-h)
    factors = {Column.GO_X: levels[number + 1] / levels[number]}
    if _order(steps, number) == 1:
        return {**factors, Column.GO_DATA: -share}
    r = (_log_ratio(levels[number - 1]) - _log_ratio(levels[number])) / h
    return {**factors, Column.GO_DATA: -share * (1 - 0.5 / r), Column.GO_OLDER: -share * 0.5 / r}


def _order(steps: int, number: int) -> int:
    return min(2, steps - number, number + 1)


def _log_ratio(level: float) -> float:
    """Return the logarithm of the data's share over the noise's."""
    return math.log(1 - level) - math.log(level)
