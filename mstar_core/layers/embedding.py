"""Token embedding and the head that may share its matrix. Used by model plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.functional import embedding, linear

if TYPE_CHECKING:
    from torch import Tensor


class TokenEmbedding(nn.Embedding):
    """ids int64 [T] -> [T, width]."""

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


class Head(nn.Module):
    """hidden [n, width] -> float32 logits [n, vocab], from its own matrix or from a tied embedding's."""

    def __init__(self, width: int, vocab: int, tied_to: TokenEmbedding | None = None) -> None:
        super().__init__()
        # A tied matrix stays the embedding's parameter: registered twice it would be loaded and counted twice.
        self._tied = (tied_to,) if tied_to is not None else None
        if tied_to is None:
            self.weight = nn.Parameter(nn.Linear(width, vocab, bias=False).weight.detach(), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self._tied[0].weight if self._tied is not None else self.weight
        return linear(hidden.to(weight.dtype), weight).float()
