"""Positions of the tokens of passes, computed on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mstar_core.engine.steps.plan import PassPlan


def host_positions(passes: Sequence[PassPlan]) -> np.ndarray:
    """Return the positions of all tokens of passes without given ones: int64 [tokens], or float32."""
    if len(passes) == 1:
        return _positions(passes[0])
    if all(each.attend.positions == "shared" and each.iterations == 1 for each in passes):
        positions = np.array([each.position for each in passes])
        return _typed(np.repeat(positions, [each.count for each in passes]))
    return np.concatenate([_positions(each) for each in passes])


def _positions(planned: PassPlan) -> np.ndarray:
    # By numpy: torch takes several times as long for an arange this short.
    if planned.attend.positions == "shared":
        if planned.iterations == 1:
            return _typed(np.full(planned.count, planned.position))
        numbers = planned.position + np.arange(planned.iterations)
        return _typed(np.repeat(numbers, planned.item_tokens))
    return _typed(planned.position + np.arange(planned.count))


def _typed(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32) if numbers.dtype.kind == "f" else numbers
