"""Token embedding, and the head that may share its weight. Used by model plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import embedding

from mstar_core.layers.linear import LinearWeight, project

if TYPE_CHECKING:
    from torch import Tensor


class TokenEmbedding(nn.Embedding):
    """Embedding of token ids: int64 [T] -> [T, width]."""

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


class Head(nn.Module):
    """Language-model head: hidden [n, width] -> logits [n, vocab] in the weight's dtype. The weight may be tied."""

    def __init__(self, width: int, vocab: int, tied_to: TokenEmbedding | None = None) -> None:
        super().__init__()
        # A tied weight stays the embedding's parameter. Registered twice, it would be loaded and counted twice.
        self._tied = (tied_to,) if tied_to is not None else None
        self._quantized: LinearWeight | None = None
        if tied_to is None:
            self.weight = nn.Parameter(nn.Linear(width, vocab, bias=False).weight.detach(), requires_grad=False)

    @property
    def is_tied(self) -> bool:
        """Whether the weight is the embedding's."""
        return self._tied is not None

    @property
    def linear_weight(self) -> LinearWeight:
        """The weight, in float8 if it was quantized."""
        if self._quantized is not None:
            return self._quantized
        return LinearWeight(self._tied[0].weight if self._tied is not None else self.weight)

    def replace(self, weight: LinearWeight) -> None:
        """Replace the weight by a quantized one and free its memory. Called by `quantize`."""
        self._quantized = weight
        del self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.linear_weight
        return project(hidden if weight.scale is not None else hidden.to(weight.values.dtype), weight)

    def restrict(self, spans: Sequence[range]) -> None:
        """Restrict the vocabulary to these ids, in their order: logits [n, ids]. Called once the weights are loaded.

        The rows are gathered on the weight's device; a tied embedding stays whole. The ids must lie within the
        vocabulary.
        """
        weight = self.linear_weight.values
        rows = torch.cat([torch.arange(span.start, span.stop, span.step, device=weight.device) for span in spans])
        self._tied = None
        self.weight = nn.Parameter(weight.detach().index_select(0, rows), requires_grad=False)
