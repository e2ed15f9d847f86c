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


def commit_ids(slots: DeviceSlots, indices: Tensor, ids: Tensor, *, sees: bool) -> Tensor:
    """Store drawn ids (int64 [n]) in the slots: last ids, stop checks and, if `sees`, seen ids.

    A stopped sequence keeps its last id. Returns the resulting ids, int64 [n]. Padding items may overwrite each other
    in the spare slot, which is never read.
    """
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
    if sees:
        flat = indices * slots.seen.shape[1] + drawn.clamp(min=0)
        slots.seen.view(-1).index_fill_(0, flat, True)
    return drawn


def _kernels() -> ModuleType:
    """Import the kernels. They need triton, which only a CUDA build of torch brings."""
    return importlib.import_module("mstar_core.engine.device_state.slot_kernels")
