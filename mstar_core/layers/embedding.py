"""Token embedding and the head that may share its matrix. Used by model plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import embedding

from mstar_core.layers.matrix import Matrix, project

if TYPE_CHECKING:
    from torch import Tensor


class TokenEmbedding(nn.Embedding):
    """ids int64 [T] -> [T, width]."""

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


class Head(nn.Module):
    """hidden [n, width] -> logits [n, vocab] in the matrix' dtype, from its own matrix or from a tied embedding's."""

    def __init__(self, width: int, vocab: int, tied_to: TokenEmbedding | None = None) -> None:
        super().__init__()
        # A tied matrix stays the embedding's parameter: registered twice it would be loaded and counted twice.
        self._tied = (tied_to,) if tied_to is not None else None
        self._quantized: Matrix | None = None
        if tied_to is None:
            self.weight = nn.Parameter(nn.Linear(width, vocab, bias=False).weight.detach(), requires_grad=False)

    @property
    def is_tied(self) -> bool:
        """Whether the matrix is the embedding's."""
        return self._tied is not None

    @property
    def matrix(self) -> Matrix:
        """The weights, float8 ones where they were replaced."""
        if self._quantized is not None:
            return self._quantized
        return Matrix(self._tied[0].weight if self._tied is not None else self.weight)

    def replace(self, matrix: Matrix) -> None:
        """Take quantised weights for its own, whose memory is freed. Called by `quantize`."""
        self._quantized = matrix
        del self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        matrix = self.matrix
        return project(hidden if matrix.scale is not None else hidden.to(matrix.values.dtype), matrix)

    def restrict(self, spans: Sequence[range]) -> None:
        """Keep the rows of these ids alone, in their order: logits [n, ids]. Called after the weights were loaded.

        The rows are gathered on the device where the weights are; a tied embedding stays whole. The ids must lie
        within the vocabulary.
        """
        weight = self.matrix.values
        rows = torch.cat([torch.arange(span.start, span.stop, span.step, device=weight.device) for span in spans])
        self._tied = None
        self.weight = nn.Parameter(weight.detach().index_select(0, rows), requires_grad=False)
