"""Sampler of one node: ids from logits and columns of parameters, by kernels on CUDA and PyTorch elsewhere.

Captured steps call it over their static buffers, uncaptured ones over columns that were just uploaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from mstar_core.engine.sampling import columns as encoding
from mstar_core.engine.sampling.logit_subset import LogitSubset
from mstar_core.engine.sampling.masks import MASK_ROWS, MASKS, masked
from mstar_core.graph.declare.sampling import MOST_BIASED
from mstar_core.layers.sampling import sorted_draw

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.device_state.slots import DeviceSlots
    from mstar_core.graph.declare.nodes import NodeSpec


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
        device. chance: float64 [n] in [0, 1), the points of the distributions to take. slots: int64 [n]. Columns with
        masks (`masks.fields`) set forbidden ids to minus infinity before everything else.
        """
        subset = self.subset
        # The CUDA kernels read any float type and rows that lie apart, which saves copies of the logits.
        is_apart = logits.stride(1) == 1 and logits.stride(0) >= logits.shape[1]
        logits = subset.suppress(logits if is_apart else logits.contiguous())
        if MASKS in columns:
            logits = masked(logits, columns[MASKS], columns[MASK_ROWS], subset)
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
            return self._slots.store_ids(slots, ids, **marks)
        kept = self._slots.commit_ids(slots[:tracked], ids[:tracked], **marks)
        if tracked == len(ids):
            return kept
        return torch.cat([kept, self._slots.store_ids(slots[tracked:], ids[tracked:], **marks)])


def adjusted(logits: Tensor, columns: Mapping[str, Tensor], counts: Tensor, subset: LogitSubset) -> Tensor:
    """Return logits with biases and without what the penalties subtract: float32 [n, columns].

    A sequence whose adjustments are off keeps its bits. logits: [n, columns] of any float type. columns: those of
    `columns.fields`. counts: int32 [n, vocabulary], how often each id was drawn.
    """
    ids, biases = columns["bias_ids"].view(-1, MOST_BIASED), columns["biases"].view(-1, MOST_BIASED)
    logits = logits.to(torch.float32, copy=True)
    logits.scatter_add_(1, *subset.biased(ids, biases))
    counts = subset.select(counts)
    logits -= columns["frequency"][:, None] * counts
    logits -= columns["presence"][:, None] * (counts > 0)
    return logits


def penalised(logits: Tensor, penalty: Tensor, seen: Tensor) -> Tensor:
    """Divide the positive and multiply the negative logits of seen ids by the penalty.

    logits: float32 [n, columns]; penalty: float32 [n]; seen: bool [n, columns].
    """
    weight = penalty[:, None]
    divided, multiplied = logits / weight, logits * weight
    # For penalties of 1 or more the smaller value is right for both signs, at a fifth of the cost of a comparison.
    has_bonus = bool((penalty < 1).any())
    changed = torch.where(logits > 0, divided, multiplied) if has_bonus else torch.minimum(divided, multiplied)
    return torch.where(seen, changed, logits)
