"""Slot updates of captured decode steps: next ids before the forward, drawn ids after it.

One kernel each on CUDA, in place of fourteen launches; plain operations elsewhere.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.device_state.slots import DeviceSlots


def next_ids(slots: DeviceSlots, indices: Tensor) -> Tensor:
    """Return the ids that these slots read next: int64 [n]. indices: int64 [n]. A slot without an id reads id 0."""
    if slots.device.type == "cuda":
        found: Tensor = _kernels().next_ids(slots.last, indices)
        return found
    return slots.last.index_select(0, indices).clamp(min=0)


def store_ids(slots: DeviceSlots, indices: Tensor, ids: Tensor, *, sees: bool, counts: bool = False) -> Tensor:
    """Store drawn ids (int64 [n]) in the slots: last ids and, if asked, seen ids and counts. Returns the ids."""
    slots.last.index_copy_(0, indices, ids)
    _mark(slots, indices, ids, sees=sees)
    if counts:
        _count(slots, indices, ids, torch.ones_like(ids, dtype=torch.int32))
    return ids


def commit_ids(slots: DeviceSlots, indices: Tensor, ids: Tensor, *, sees: bool, counts: bool = False) -> Tensor:
    """Store drawn ids (int64 [n]) in the slots: last ids, stop checks and, if asked, seen ids and counts.

    A stopped sequence keeps its last id, which does not count again. Returns the resulting ids, int64 [n]. Padding
    items may overwrite each other in the spare slot, which is never read.
    """
    if counts:
        runs = ~slots.stopped.index_select(0, indices)
        _count(slots, indices, ids, runs.to(torch.int32))
    if slots.device.type == "cuda":
        drawn: Tensor = _kernels().commit_ids(
            ids,
            indices,
            slots.last,
            slots.stopped,
            slots.stop_ids,
            slots.seen if sees else None,
        )
        return drawn
    return commit_ids_plainly(slots, indices, ids, sees=sees)


def commit_ids_plainly(slots: DeviceSlots, indices: Tensor, ids: Tensor, *, sees: bool) -> Tensor:
    """Do the same by plain operations: the reference of the kernel."""
    last = slots.last.index_select(0, indices)
    stopped = slots.stopped.index_select(0, indices)
    drawn = torch.where(stopped, last, ids)
    hit = (drawn[:, None] == slots.stop_ids.index_select(0, indices)).any(dim=1)
    slots.stopped.index_copy_(0, indices, stopped | hit)
    slots.last.index_copy_(0, indices, drawn)
    _mark(slots, indices, drawn, sees=sees)
    return drawn


def _mark(slots: DeviceSlots, indices: Tensor, ids: Tensor, *, sees: bool) -> None:
    if sees:
        slots.seen.view(-1).index_fill_(0, _flat(slots, indices, ids), True)


def _count(slots: DeviceSlots, indices: Tensor, ids: Tensor, times: Tensor) -> None:
    slots.counts().view(-1).index_add_(0, _flat(slots, indices, ids), times)


def _flat(slots: DeviceSlots, indices: Tensor, ids: Tensor) -> Tensor:
    """Return the places of ids in an array [slots + 1, vocabulary]. A missing id counts as id 0; its request fails."""
    return indices * slots.vocab + ids.clamp(min=0)


def _kernels() -> ModuleType:
    """Import the kernels. They need triton, which only a CUDA build of torch brings."""
    return importlib.import_module("mstar_core.engine.device_state.slot_kernels")
