"""Masks of a planned draw, which the host computes while the device runs the layers of the same step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class Masks:
    """Bits of the ids that constrained sequences may draw. Made by the scheduler, read once the layers are launched.

    compute: returns int32 [constrained, words]. Called at the first read, before anything of the sequences changes.
    """

    def __init__(self, compute: Callable[[], np.ndarray]) -> None:
        self._compute = compute

    @cached_property
    def bits(self) -> np.ndarray:
        """The masks: int32 [constrained, words]."""
        return self._compute()

    def rows(self, chosen: np.ndarray) -> Masks:
        """Return the masks of some of the sequences. chosen: their places."""
        return Masks(lambda: self.bits[chosen])
