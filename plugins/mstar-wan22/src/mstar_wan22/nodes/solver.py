"""The node `solver`: first noise of a video, then one step of the flow per call. It has no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mstar_core.engine.module import NodeModule
from mstar_core.engine.transfers import upload
from mstar_core.errors import EngineError
from mstar_wan22.request.schedule import FOLDED_INPUTS, FOLDED_OUTPUTS, Column, solver_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from torch import Tensor

HISTORY = 3
"""Earlier values of a step: the corrected x of the step before, and the data that the last two steps predicted."""


def advance(x: Tensor, history: Tensor, velocity: Tensor, row: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return x and history behind a step, in float32.

    x, velocity: [channels, frames, rows, columns]. history: [HISTORY, ...]: corrected x, data of the last and of the
    step before it. row: factors of the step, columns of `request.schedule.Column`. Behind a folded step the history
    also has its velocity: see `request.schedule.folded`.
    """
    last, older, oldest = history[:HISTORY].unbind(0)
    factor = [float(value) for value in row]
    if len(factor) == len(Column):
        following, fixed, data, older = solver_step(x, last, older, oldest, velocity, factor)
        return following, torch.stack([fixed, data, older])
    before = history[HISTORY] if len(history) > HISTORY else torch.zeros_like(x)
    values = (x, last, older, oldest, velocity, before)
    following, *kept = (_mixed(values, row) for row in _matrix(factor))
    return following, torch.stack([*kept, velocity])


def _matrix(factor: Sequence[float]) -> Iterator[Sequence[float]]:
    """Yield the factors of each value behind a folded step."""
    first = len(Column)
    for start in range(first, first + FOLDED_OUTPUTS * FOLDED_INPUTS, FOLDED_INPUTS):
        yield factor[start : start + FOLDED_INPUTS]


def _mixed(values: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return the sum of values times factors. Values without effect are not read."""
    total = torch.zeros_like(values[0])
    for value, factor in zip(values, factors, strict=True):
        if factor:
            total.add_(value, alpha=factor)
    return total


class Solver(nn.Module, NodeModule):
    """See the module. Videos are computed one by one, so results do not depend on the batch."""

    host_ports = ("steps", "step", "grid", "seeds")
    listed_ports = ("latents", "history", "velocity")
    device_outputs = ("latents", "history", "progress", "estimate")  # progress is made on the host

    def __init__(self, channels: int, device: torch.device) -> None:
        super().__init__()
        self._channels = channels
        self._device = device

    def forward(
        self,
        *,
        seeds: np.ndarray,
        grid: Sequence[np.ndarray] | None = None,
        latents: Sequence[Tensor] = (),
        history: Sequence[Tensor] = (),
        velocity: Sequence[Tensor] = (),
        steps: Sequence[np.ndarray] = (),
        step: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """Return {"latents", "history"}, B float32 tensors each, see `advance`.

        With grid, an array [frames, rows, columns] per video of which only the shape is read: the first noise. Else a
        step, which also returns "progress", int64 [2] on the host (steps done, all steps), and "estimate", the middle
        frame of the data, [channels, 1, rows, columns]. Raises EngineError if the last latents are not finite.
        """
        if grid is not None:
            noise = [self.noise(cells.shape, int(seed)) for cells, seed in zip(grid, seeds, strict=True)]
            return {"latents": noise, "history": [x.new_zeros(HISTORY, *x.shape) for x in noise]}
        assert step is not None
        moved = []
        for item, x in enumerate(latents):
            moved.append(advance(x, history[item], velocity[item], steps[item][int(step[item])]))
        rows = [table[int(number)] for table, number in zip(steps, step, strict=True)]
        for (x, _), row in zip(moved, rows, strict=True):
            if row[Column.NUMBER] + 1 == row[Column.TOTAL] and not bool(torch.isfinite(x).all()):
                raise EngineError("the video's latents are not finite", "a step overflowed", node="solver")
        told = [torch.tensor([round(float(row[Column.NUMBER])) + 1, round(float(row[Column.TOTAL]))]) for row in rows]
        middles = [values[1][:, values.shape[2] // 2, None].contiguous() for _, values in moved]
        return {
            "latents": [x for x, _ in moved],
            "history": [values for _, values in moved],
            "progress": told,
            "estimate": middles,
        }

    def noise(self, grid: tuple[int, ...], seed: int) -> Tensor:
        """Return normal noise, float32 [channels, frames, rows, columns], from a generator of its own on the host."""
        drawn = torch.randn((1, self._channels, *grid), generator=torch.Generator().manual_seed(seed))
        return upload(drawn[0], self._device)
