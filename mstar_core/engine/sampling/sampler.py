"""Sampler of one node: ids from logits and columns of parameters, by kernels on CUDA and PyTorch elsewhere.

Captured steps call it over their static buffers, uncaptured ones over columns that were just uploaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mstar_core.engine.device_state import slot_update
from mstar_core.engine.sampling import columns as encoding
from mstar_core.engine.sampling.adjustments import adjusted, penalised
from mstar_core.engine.sampling.logit_subset import LogitSubset
from mstar_core.engine.transfers import upload
from mstar_core.layers import rng
from mstar_core.layers.sampling import sorted_draw

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.device_state.slots import DeviceSlots
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.graph.declare.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class UploadedColumns:
    """The columns of one batch on the device, made once per change of membership.

    states: int64 [n], on the host. is_greedy: no draw needs a random number. penalises: a repetition penalty is on.
    """

    columns: dict[str, Tensor]
    states: np.ndarray
    is_greedy: bool
    penalises: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> UploadedColumns:
        """Encode and upload parameters, without waiting for the device."""
        arrays = encoding.columns(params, len(params), adjusting=any(each.adjusts for each in params))
        return cls(
            {name: upload(array, device) for name, array in arrays.items()},
            encoding.states(params),
            is_greedy=all(each.temperature <= 0 for each in params),
            penalises=any(each.repetition_penalty != 1 for each in params),
        )

    def chance(self, counter: np.ndarray) -> np.ndarray:
        """Return the points of the next draws: float64 [n]. counter: int64 [n], ids drawn before."""
        return np.zeros(len(counter)) if self.is_greedy else rng.uniform_host(self.states, counter)


class Sampler:
    """Draws ids of one node and stores them in its slots. Shared by all its steps; holds no state of its own.

    subset: the columns of the logits. sees: whether the repetition penalty can apply.
    """

    def __init__(self, spec: NodeSpec, slots: DeviceSlots) -> None:
        self.subset = LogitSubset(spec, slots.vocab, slots.device)
        self.sees = spec.sampling is not None and spec.sampling.history != "none"
        self._slots = slots
        self._kernels: Any = None
        if slots.device.type == "cuda":
            self._kernels = importlib.import_module("mstar_core.engine.sampling.top_p")
        self._ids = None if self.subset.ids is None else self.subset.ids.to(torch.int32)

    def draw(self, logits: Tensor, columns: Mapping[str, Tensor], chance: Tensor, slots: Tensor) -> Tensor:
        """Return drawn ids, int64 [n]; BAD_ROW where logits have no finite maximum.

        logits: [n, columns] of any float type; suppressed in place. columns: as `columns.fields` names them, on the
        device. chance: float64 [n] in [0, 1), the points of the distributions to take. slots: int64 [n].
        """
        subset = self.subset
        # The CUDA kernels read any float type, which saves a float32 copy of the logits.
        logits = subset.suppress(logits.contiguous())
        if encoding.adjusts(columns):
            logits = adjusted(logits, columns, self._slots.counts().index_select(0, slots), subset)
        seen = self._slots.seen if self.sees else None
        if self._kernels is not None:
            drawn: Tensor = self._kernels.draw(logits, columns, chance, slots, seen, self._ids)
            return drawn
        logits, penalty = logits.to(torch.float32), columns["penalty"]
        if seen is not None and bool((penalty != 1).any()):
            logits = penalised(logits, penalty, subset.select(seen.index_select(0, slots)))
        return subset.drawn(sorted_draw(logits, columns, chance))

    def store(
        self, columns: Mapping[str, Tensor], slots: Tensor, ids: Tensor, tracked: int = 0, *, penalises: bool = True
    ) -> Tensor:
        """Store drawn ids in their slots and return the resulting ids, int64 [n].

        tracked: so many first sequences check their stop ids on the device and keep their last id once they stopped.
        penalises: False if no draw of the batch reads seen ids, which are then not marked.
        """
        marks = {"sees": self.sees and penalises, "counts": encoding.adjusts(columns)}
        if tracked == 0:
            return slot_update.store_ids(self._slots, slots, ids, **marks)
        kept = slot_update.commit_ids(self._slots, slots[:tracked], ids[:tracked], **marks)
        if tracked == len(ids):
            return kept
        return torch.cat([kept, slot_update.store_ids(self._slots, slots[tracked:], ids[tracked:], **marks)])
