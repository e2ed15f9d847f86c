"""Log-probabilities of drawn ids and of the most likely ones, by the model's own distribution.

Computed from the logits of the head in float32, before suppression, masks, biases, penalties and temperature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import pad

from mstar_core.graph.declare.sampling import MOST_LOGPROBS

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.sampling.logit_subset import LogitSubset

WIDTH: Final = 1 + 2 * MOST_LOGPROBS
"""Numbers per id: its log-probability, then pairs of an id and its log-probability, the most likely first."""


def log_probabilities(logits: Tensor) -> Tensor:
    """Return log-softmax, float32 [n, columns]. Called before the draw, which changes logits in place."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def scores(logprobs: Tensor, ids: Tensor, subset: LogitSubset) -> Tensor:
    """Return the numbers of drawn ids: float64 [n, WIDTH], which holds every id exactly.

    logprobs: float32 [n, columns]. ids: int64 [n]; a number of BAD_ROW has no meaning. A vocabulary of fewer ids than
    MOST_LOGPROBS leaves pairs of id -1.
    """
    count = min(MOST_LOGPROBS, logprobs.shape[1])
    own = logprobs.gather(1, subset.columns(ids.clamp(min=0))[:, None]).double()
    top = logprobs.topk(count, dim=1)
    names = subset.drawn(top.indices.reshape(-1)).view(-1, count)
    pairs = torch.stack([names.double(), top.values.double()], dim=-1).flatten(1)
    return torch.cat([own, pad(pairs, (0, 2 * (MOST_LOGPROBS - count)), value=-1.0)], dim=1)
