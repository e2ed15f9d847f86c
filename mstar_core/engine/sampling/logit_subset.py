"""Map from the columns of a node's logits to ids: all ids in order, or the subset that the node can draw.

Used by uncaptured and captured steps. A head of fewer rows gives fewer columns; seen ids, stop ids and prompts stay
indexed by id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar_core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.graph.declare.nodes import NodeSpec


class LogitSubset:
    """The columns of one node's logits. Immutable; owned by the code that samples them.

    ids: int64 [columns] on the device, None if column and id are the same. Raises ConfigError if the declared ids are
    not ascending or lie outside the vocabulary.
    """

    def __init__(self, spec: NodeSpec, vocab: int, device: torch.device) -> None:
        self._node = spec.name
        sampling = spec.sampling
        spans = sampling.vocabulary if sampling is not None else ()
        given = np.concatenate([np.arange(*_bounds(span)) for span in spans]) if spans else np.arange(vocab)
        if spans:
            _check(spec.name, given, vocab)
        self.count = len(given)
        self.ids: Tensor | None = torch.from_numpy(given).to(device) if spans else None
        places = np.full(vocab, -1, dtype=np.int64)
        places[given] = np.arange(len(given))
        self._places = torch.from_numpy(places).to(device) if spans else None
        hidden = [np.isin(given, np.arange(*_bounds(span))) for span in (sampling.suppress if sampling else ())]
        self.has_suppressed = any(bool(each.any()) for each in hidden)
        self._suppressed = torch.from_numpy(np.any(hidden, axis=0)).to(device) if self.has_suppressed else None

    @property
    def are_some(self) -> bool:
        """Whether the columns are a subset of the ids."""
        return self.ids is not None

    def suppress(self, logits: Tensor) -> Tensor:
        """Set the columns that are never drawn to minus infinity, in place. logits: [n, columns]; returned.

        Raises EngineError if the head gave another number of columns.
        """
        if logits.shape[1] != self.count:
            raise EngineError(
                f"the head of node {self._node} gave {logits.shape[1]} columns, not {self.count}",
                "a node that declares the ids it can draw has a head of these rows alone, in their order"
                if self.are_some
                else "the vocabulary of the node and the rows of its head differ",
                node=self._node,
            )
        return logits if self._suppressed is None else logits.masked_fill_(self._suppressed, float("-inf"))

    def select(self, marks: Tensor) -> Tensor:
        """Return the marks of the columns' ids: [n, vocab] -> [n, columns]."""
        return marks if self.ids is None else marks.index_select(1, self.ids)

    def biased(self, ids: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of ids and their biases, both [n, width]. An id without a column biases nothing."""
        if self._places is None:
            return ids, biases
        places = self._places[ids]
        return places.clamp(min=0), torch.where(places < 0, -0.0, biases)

    def columns(self, ids: Tensor) -> Tensor:
        """Return the columns of ids, int64 [n]; column 0 for an id without one."""
        return ids if self._places is None else self._places[ids].clamp(min=0)

    def drawn(self, columns: Tensor) -> Tensor:
        """Return the ids of drawn columns, int64 [n]; BAD_ROW stays."""
        if self.ids is None:
            return columns
        return torch.where(columns < 0, columns, self.ids.index_select(0, columns.clamp(min=0)))


def _bounds(span: range) -> tuple[int, int, int]:
    return span.start, span.stop, span.step


def _check(node: str, ids: np.ndarray, vocab: int) -> None:
    if len(ids) == 0 or ids[0] < 0 or ids[-1] >= vocab or bool((np.diff(ids) <= 0).any()):
        raise ConfigError(
            f"the ids that node {node} can draw do not fit its vocabulary of {vocab}",
            f"{len(ids)} ids" + (f", {int(ids.min())} to {int(ids.max())}" if len(ids) else ""),
            "give Sampling.vocabulary ranges that ascend, do not overlap and end within the vocabulary",
            key=node,
        )
