"""Device half of a node's slots: last ids, stop rules and seen ids, one row per slot.

Steps read and write it without waiting for the host, whose half is `cache.slots.Slots`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar_core.engine.steps.updates import NO_ID, STOP_WIDTH
from mstar_core.engine.transfers import upload

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.steps.updates import SlotChanges


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
        if changes.counted is not None:
            places = upload(changes.counted, self.device)
            self.counts().view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

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

    def stop(self, stopped: np.ndarray) -> None:
        """Mark the sequences of slots (int64 [n]) as stopped: the steps that follow change nothing that is read."""
        self.stopped.index_fill_(0, upload(stopped, self.device), True)

    # -- within a step: one kernel each on CUDA, in place of fourteen launches; plain operations elsewhere ------------

    def next_ids(self, indices: Tensor) -> Tensor:
        """Return the ids that these slots read next: int64 [n]. indices: int64 [n]. A slot without an id reads id 0."""
        if self.device.type == "cuda":
            ids: Tensor = _kernels().next_ids(self.last, indices)
            return ids
        return self.last.index_select(0, indices).clamp(min=0)

    def store_ids(self, indices: Tensor, ids: Tensor, *, sees: bool, counts: bool = False) -> Tensor:
        """Store drawn ids (int64 [n]) in the slots: last ids and, if asked, seen ids and counts. Returns the ids."""
        self.last.index_copy_(0, indices, ids)
        self._mark(indices, ids, sees=sees)
        if counts:
            self._count(indices, ids, torch.ones_like(ids, dtype=torch.int32))
        return ids

    def commit_ids(self, indices: Tensor, ids: Tensor, *, sees: bool, counts: bool = False) -> Tensor:
        """Store drawn ids (int64 [n]) in the slots: last ids, stop checks and, if asked, seen ids and counts.

        A stopped sequence keeps its last id, which does not count again. Returns the resulting ids, int64 [n]. Padding
        items may overwrite each other in the spare slot, which is never read.
        """
        if counts:
            runs = ~self.stopped.index_select(0, indices)
            self._count(indices, ids, runs.to(torch.int32))
        if self.device.type == "cuda":
            drawn: Tensor = _kernels().commit_ids(
                ids,
                indices,
                self.last,
                self.stopped,
                self.stop_ids,
                self.seen if sees else None,
            )
            return drawn
        return self.commit_ids_plainly(indices, ids, sees=sees)

    def commit_ids_plainly(self, indices: Tensor, ids: Tensor, *, sees: bool) -> Tensor:
        """Do the same by plain operations: the reference of the kernel."""
        last = self.last.index_select(0, indices)
        stopped = self.stopped.index_select(0, indices)
        drawn = torch.where(stopped, last, ids)
        hit = (drawn[:, None] == self.stop_ids.index_select(0, indices)).any(dim=1)
        self.stopped.index_copy_(0, indices, stopped | hit)
        self.last.index_copy_(0, indices, drawn)
        self._mark(indices, drawn, sees=sees)
        return drawn

    # -- parts -------------------------------------------------------------------------------------------------------

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

    def _mark(self, indices: Tensor, ids: Tensor, *, sees: bool) -> None:
        if sees:
            self.seen.view(-1).index_fill_(0, self._flat(indices, ids), True)

    def _count(self, indices: Tensor, ids: Tensor, times: Tensor) -> None:
        self.counts().view(-1).index_add_(0, self._flat(indices, ids), times)

    def _flat(self, indices: Tensor, ids: Tensor) -> Tensor:
        """Return the places of ids in an array [slots + 1, vocabulary]. A missing id counts as 0; its request fails."""
        return indices * self.vocab + ids.clamp(min=0)


def _kernels() -> ModuleType:
    """Import the kernels. They need triton, which only a CUDA build of torch brings."""
    return importlib.import_module("mstar_core.engine.device_state.slot_kernels")
