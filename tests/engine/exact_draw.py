"""The drawn id by definition, in float64 and with everything sorted, for tests of samplers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mstar_core.engine.sampling.columns import UploadedColumns
from mstar_core.engine.sampling.sampler import penalised
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers import sampling

ROUNDING = 1e-5
"""Of the whole mass: how far a float32 share may move an edge."""


def sample(logits: Tensor, params: Sequence[SamplingParams], seen: Tensor | None, counter: Tensor) -> Tensor:
    """Return the ids that the PyTorch form draws: int64 [n]. logits: float32 [n, vocab]; counter: int64 [n]."""
    uploaded = UploadedColumns.of(params, torch.device("cpu"))
    if seen is not None:
        logits = penalised(logits, uploaded.columns["penalty"], seen)
    return sampling.sorted_draw(logits, uploaded.columns, torch.from_numpy(uploaded.chance(counter.numpy())))


def probabilities(logits: Tensor, params: Sequence[SamplingParams], seen: Tensor | None) -> Tensor:
    """Return the distribution of `sample`: float64 [n, vocab]."""
    columns = UploadedColumns.of(params, torch.device("cpu")).columns
    if seen is not None:
        logits = penalised(logits, columns["penalty"], seen)
    return sampling.probabilities(logits, columns)


def is_right(drawn: int, logits: Tensor, params: SamplingParams, seen: Tensor, chance: float) -> bool:
    """Whether `drawn` is the id at `chance` of the nucleus, or next to it within a rounding error.

    logits: float32 [vocab]; seen: bool [vocab]. The order is by value, then by id; the nucleus is its smallest prefix
    whose mass reaches top_p.
    """
    weight = params.repetition_penalty
    logits = torch.where(seen, torch.where(logits > 0, logits / weight, logits * weight), logits)
    if params.temperature <= 0:
        return drawn == int((logits == logits.max()).nonzero()[0])
    values = (logits / params.temperature).double()
    share = (values - values.max()).exp()
    order = share.argsort(descending=True, stable=True)
    total = share[order].cumsum(0) / share.sum()
    before = total - share[order] / share.sum()
    at = int((order == drawn).nonzero()[0])
    for slack in (-ROUNDING, 0.0, ROUNDING):
        count = len(order) if params.top_p >= 1 else max(int((before < params.top_p + slack).sum()), 1)
        point = chance * float(total[count - 1])
        if at < count and float(before[at]) - ROUNDING <= point <= float(total[at]) + ROUNDING:
            return True
    return False
