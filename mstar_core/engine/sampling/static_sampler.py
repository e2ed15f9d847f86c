"""Sampling over static buffers, as captured steps need it. Owned by one bucket of a step; draws as `sampler` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mstar_core.engine.sampling import rng, sampler
from mstar_core.engine.sampling.sampler import SamplingRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from mstar_core.engine.base import SamplingParams
    from mstar_core.engine.device_state.slots import DeviceSlots
    from mstar_core.engine.sampling.logit_subset import Columns

PARAMETERS: Final = {
    "slots": torch.int64,
    "top_p": torch.float64,
    "min_p": torch.float64,
    "top_k": torch.int64,
    "temperature": torch.float32,
    "penalty": torch.float32,
    "greedy": torch.bool,
}
"""Parameters of a draw per sequence, in the order of their fields."""


def parameter_fields(count: int) -> dict[str, tuple[torch.dtype, int]]:
    """Return the staging fields of the parameters of so many draws."""
    return {name: (dtype, count) for name, dtype in PARAMETERS.items()}


def parameter_values(
    count: int, slots: np.ndarray, chosen: Sequence[SamplingParams], spare: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the parameter fields of so many draws, and the random states of the chosen ones (int64 [n]).

    slots: int64 [n]; chosen: their n parameters. The draws past them are greedy and belong to the spare slot.
    """
    used = len(chosen)
    values = {
        "slots": np.full(count, spare, dtype=np.int64),
        "top_p": np.full(count, 2.0),
        "min_p": np.zeros(count),
        "top_k": np.zeros(count, dtype=np.int64),
        "temperature": np.ones(count, dtype=np.float32),
        "penalty": np.ones(count, dtype=np.float32),
        "greedy": np.ones(count, dtype=np.bool_),
    }
    values["slots"][:used] = slots
    values["top_p"][:used] = [2.0 if each.top_p >= 1 else each.top_p for each in chosen]
    values["min_p"][:used] = [each.min_p for each in chosen]
    values["top_k"][:used] = [max(each.top_k, 0) for each in chosen]
    values["temperature"][:used] = [1.0 if each.temperature <= 0 else each.temperature for each in chosen]
    values["penalty"][:used] = [each.repetition_penalty for each in chosen]
    values["greedy"][:used] = [each.temperature <= 0 for each in chosen]
    return values, rng.seeded(np.array([rng.to_int64(each.seed) for each in chosen], dtype=np.int64))


class StaticSampler:
    """Draws one id for each item of a bucket: kernels without a host decision on CUDA, `sampler` on the CPU."""

    def __init__(
        self,
        count: int,
        columns: Columns,
        slots: DeviceSlots,
        parameters: Mapping[str, Tensor],
        chance: Tensor,
        *,
        sees: bool,
    ) -> None:
        """parameters: device fields of `parameter_fields`. chance: float64 [count]. sees: a penalty applies."""
        self._columns = columns
        self._seen = slots.seen if sees else None
        self._parameters = parameters
        self._chance = chance
        self._nucleus: Any = None
        if slots.device.type == "cuda":
            from mstar_core.engine.sampling.top_p import NucleusSampler

            ids = None if columns.ids is None else columns.ids.to(torch.int32)
            self._nucleus = NucleusSampler(count, columns.count, slots.device, ids)

    def draw(self, logits: Tensor) -> Tensor:
        """Return drawn ids, int64 [count]. logits: [count, columns] of any float type; suppressed in place."""
        if self._nucleus is None and logits.dtype != torch.float32:
            logits = logits.to(torch.float32)
        # The CUDA kernels read any float type, which saves a float32 copy of the logits.
        logits = self._columns.suppress(logits.contiguous())
        own, seen = self._parameters, self._seen
        if self._nucleus is not None:
            drawn: Tensor = self._nucleus.draw(
                logits,
                seen=seen,
                slots=own["slots"],
                penalty=own["penalty"],
                temperature=own["temperature"],
                top_p=own["top_p"],
                greedy=own["greedy"],
                chance=self._chance,
                top_k=own["top_k"],
                min_p=own["min_p"],
            )
            return drawn
        marks = None if seen is None else self._columns.seen(seen.index_select(0, own["slots"]))
        return self._columns.drawn(sampler.sample_at(logits, self._rows(), marks, self._chance))

    def _rows(self) -> SamplingRows:
        """Return the buffers as parameters of `sampler`, with every rule enabled."""
        own = self._parameters
        top_k = own["top_k"][:, None]
        return SamplingRows(
            temperature=own["temperature"][:, None],
            top_p=own["top_p"][:, None],
            top_k=torch.where(top_k > 0, top_k, sampler.TOP_K_OFF),
            min_p=own["min_p"][:, None],
            penalty=own["penalty"][:, None],
            state=own["slots"],
            greedy=own["greedy"],
            all_greedy=False,
            any_greedy=True,
            is_penalised=True,
            has_bonus=True,
            has_top_k=True,
            has_min_p=True,
            has_whole=True,
        )
