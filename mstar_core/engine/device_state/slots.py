"""Device half of a node's slots: last ids, stop rules and seen ids, one row per slot.

Steps read and write it without waiting for the host, whose half is `cache.slots.Slots`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.transfers import upload

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.steps.updates import SlotChanges

NO_ID: Final = -1
"""Marks an entry that holds no id."""

STOP_WIDTH: Final = 8
"""Stop ids of a slot before the array is widened. One entry always stays NO_ID: a sequence whose draw failed stops."""


class DeviceSlots:
    """Arrays of all slots; the last entry is a spare slot for the padding of captured steps.

    last: int64 [slots + 1]. seen: bool [slots + 1, vocab]. stop_ids: int64 [slots + 1, width], padded with NO_ID.
    stopped: bool [slots + 1]. counts: int32 [slots + 1, vocab], how often each id was drawn, allocated when the first
    request depends on it.
    """

    def __init__(self, count: int, vocab: int, device: torch.device, position_dtype: torch.dtype = torch.int64) -> None:
        self.count = count
        self.device = device
        self.position_dtype = position_dtype
        self.last = torch.full((count + 1,), NO_ID, dtype=torch.int64, device=device)
        self.seen = torch.zeros((count + 1, vocab), dtype=torch.bool, device=device)
        self.stop_ids = torch.full((count + 1, STOP_WIDTH), NO_ID, dtype=torch.int64, device=device)
        self.stopped = torch.zeros(count + 1, dtype=torch.bool, device=device)
        self._counts: Tensor | None = None

    @property
    def spare(self) -> int:
        """The slot that no request gets."""
        return self.count

    @property
    def vocab(self) -> int:
        """Ids that the node can draw, 0 without sampling."""
        return self.seen.shape[1]

    def counts(self) -> Tensor:
        """Return the counts of drawn ids. The first call allocates them."""
        if self._counts is None:
            self._counts = torch.zeros(self.seen.shape, dtype=torch.int32, device=self.device)
        return self._counts

    def apply(self, changes: SlotChanges) -> None:
        """Set new values of slots, in a fixed number of calls."""
        if changes.moved is not None:
            slots, ids = upload(changes.moved, self.device)
            self.last.index_copy_(0, slots, ids)
        if changes.armed is not None:
            self._arm(changes.armed)
        if changes.blank is not None:
            blank = upload(changes.blank, self.device)
            self.seen.index_fill_(0, blank, False)
            if self._counts is not None:
                self._counts.index_fill_(0, blank, 0)
        if changes.seen is not None:
            self.seen.view(-1).index_fill_(0, upload(changes.seen, self.device), True)

    def copy(self, source: int, into: int) -> None:
        """Copy the state of slot `source` to slot `into`."""
        if self.vocab:  # without a vocabulary, no step reads the arrays
            self.last[into] = self.last[source]
            self.seen[into] = self.seen[source]
            if self._counts is not None:
                self._counts[into] = self._counts[source]

    def restore(self, slot: int, seen: Tensor | None, counts: Tensor | None) -> None:
        """Set the seen ids and counts of a slot, where they are given."""
        if seen is not None:
            self.seen[slot] = upload(seen, self.device)
        if counts is not None:
            self.counts()[slot] = upload(counts, self.device)

    def _arm(self, armed: np.ndarray) -> None:
        """Set the stop ids of slots. armed: int64 [n, 1 + width]."""
        width = armed.shape[1] - 1
        if width > self.stop_ids.shape[1]:
            wider = torch.full((self.count + 1, width), NO_ID, dtype=torch.int64, device=self.device)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        values = upload(armed, self.device)
        self.stop_ids.index_copy_(0, values[:, 0], values[:, 1:])
        self.stopped.index_fill_(0, values[:, 0], False)
