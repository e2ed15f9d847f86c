"""Flow time: its values, its embedding, and the conditioning of the expert's norms. Used by `policy`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import silu

if TYPE_CHECKING:
    from torch import Tensor


def flow_times(steps: int) -> list[float]:
    """Return the times of a flow of `steps` steps, from 1 (noise) towards 0 (data), which is excluded."""
    return [1.0 + step * (-1.0 / steps) for step in range(steps)]


def embedded(times: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """Embed times float32 [n] as float64 [n, width]: sines, then cosines.

    In float64, because the shortest period amplifies a time error of 1e-7 to 1e-4.
    """
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=times.device)
    period = min_period * (max_period / min_period) ** fraction
    angle = times.double()[:, None] * (2 * math.pi / period)[None]
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class TimeMLP(nn.Module):
    """MLP from the time embedding to the condition of the adaptive norms. float32 in any compute dtype."""

    def __init__(self, width: int, min_period: float, max_period: float) -> None:
        super().__init__()
        self.time_mlp_in = nn.Linear(width, width, dtype=torch.float32)
        self.time_mlp_out = nn.Linear(width, width, dtype=torch.float32)
        self.periods = (min_period, max_period)

    def forward(self, times: Tensor) -> Tensor:
        """Return conditions float32 [n, width]. times: float32 [n]."""
        known = embedded(times, self.time_mlp_in.in_features, *self.periods).float()
        return silu(self.time_mlp_out(silu(self.time_mlp_in(known))))


class TimeTable(nn.Module):
    """Scale, shift and gate of all norms at every flow time of any request. Computed once after weight
    loading.

    modulations: float32 [norms, times, 3 * width]. rows: int64 [steps + 1, steps], indexed by number of
    steps and step.
    """

    modulations: Tensor
    rows: Tensor

    def __init__(self, modulations: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("modulations", modulations, persistent=False)
        self.register_buffer("rows", rows, persistent=False)

    def at(self, num_steps: Tensor, step: Tensor) -> Tensor:
        """Return rows of the table, int64 [T]. num_steps, step: int64 [T]."""
        return self.rows[num_steps, step]

    def norm(self, number: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and shift of a norm at these rows: float32 [T, width] each."""
        scale, shift, _ = self.modulations[number].chunk(3, dim=-1)
        return scale.index_select(0, rows), shift.index_select(0, rows)

    def gate(self, number: int, rows: Tensor) -> Tensor:
        """Return the gate of a norm at these rows: float32 [T, width]."""
        return self.modulations[number].chunk(3, dim=-1)[2].index_select(0, rows)


def distinct_times(most_steps: int) -> tuple[Tensor, Tensor]:
    """Return the distinct times of flows of 1 to most_steps steps, float32 [times], and their `TimeTable.rows`."""
    flat = torch.tensor([time for steps in range(1, most_steps + 1) for time in flow_times(steps)])
    times, places = flat.unique(return_inverse=True)
    rows, at = torch.zeros(most_steps + 1, most_steps, dtype=torch.int64), 0
    for steps in range(1, most_steps + 1):
        rows[steps, :steps] = places[at : at + steps]
        at += steps
    return times, rows
