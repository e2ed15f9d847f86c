"""Changes of logits before the draw: logit bias, presence and frequency penalty, repetition penalty, in this order.

The first three are part only of steps whose columns have them. On CUDA, the draw's kernels apply the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from mstar_core.graph.declare.sampling import MOST_BIASED

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.sampling.logit_subset import LogitSubset


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
