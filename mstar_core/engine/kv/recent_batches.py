"""Decode batches that a tensor-parallel group has in common, so that a plan can name one by its version."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mstar_core.engine.steps.plan import DecodeBatch

MOST: Final = 2
"""Batches that are kept: constrained sequences join every other step, so two batches alternate."""


class RecentBatches:
    """The batches of the latest steps. The leader and each follower own one, and both note the same steps in order."""

    def __init__(self) -> None:
        self._batches: OrderedDict[int, DecodeBatch] = OrderedDict()

    def known(self, version: int) -> DecodeBatch | None:
        """Return the batch of a version, which then is the latest. None if it is not kept."""
        batch = self._batches.get(version)
        if batch is not None:
            self._batches.move_to_end(version)
        return batch

    def add(self, batch: DecodeBatch) -> None:
        """Keep a batch in place of the oldest one."""
        self._batches[batch.version] = batch
        if len(self._batches) > MOST:
            self._batches.popitem(last=False)
