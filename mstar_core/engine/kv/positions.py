"""Positions of the tokens of passes. Used by the KV step and by its captured passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.kv.sequence import Firing


def positions_of(firing: Firing, count: int) -> Tensor:
    """Positions of the next `count` tokens of a pass: int64 [count] on the host, or as a port gave them."""
    if firing.given is not None:
        return firing.given.narrow(-1, firing.done, count)
    if firing.attend.positions == "shared":
        if firing.iterations > 1:
            return torch.arange(firing.position, firing.next_position).repeat_interleave(firing.row_tokens)
        return torch.full((count,), firing.position, dtype=torch.int64)
    start = firing.position + firing.done
    return torch.arange(start, start + count, dtype=torch.int64)


def positions_of_whole(firings: Sequence[Firing]) -> np.ndarray:
    """Positions of all tokens of passes that no port gives them: int64 [tokens]."""
    if all(firing.attend.positions == "shared" and firing.iterations == 1 for firing in firings):
        return np.repeat(np.array([firing.position for firing in firings]), [firing.tokens for firing in firings])
    found = [_numbers(firing) for firing in firings]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _numbers(firing: Firing) -> np.ndarray:
    """The same of one pass. By numpy, which counts in a fraction of the time that torch takes to begin."""
    numbers: np.ndarray = np.arange(firing.position, firing.next_position, dtype=np.int64)
    return np.repeat(numbers, firing.row_tokens) if firing.attend.positions == "shared" else numbers
