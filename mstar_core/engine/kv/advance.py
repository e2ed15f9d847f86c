"""What a captured step does to the slots before and after its forward: plain operations, one kernel each on CUDA.

Used by the decode graphs. The kernels take the place of fourteen launches of a step.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cache.slots import Slots


def last_ids(slots: Slots, rows: Tensor) -> Tensor:
    """The ids that these rows read next: int64 [n]. rows: int64 [n], slots.

    A row without an id yet has none to look up and reads id 0; the spare slot is such a row.
    """
    if slots.device.type == "cuda":
        found: Tensor = _kernels().last_ids(slots.device_last, rows)
        return found
    return slots.device_last.index_select(0, rows).clamp(min=0)


def advance(slots: Slots, rows: Tensor, ids: Tensor, *, sees: bool) -> Tensor:
    """Take the drawn ids (int64 [n]) into the slots: last ids, stop checks and, where it `sees`, the seen ids.

    A stopped sequence keeps its last id. Returns the resulting ids, int64 [n]. Padding items may overwrite each other
    in the spare slot, which is never read.
    """
    if slots.device.type == "cuda":
        drawn: Tensor = _kernels().advance(
            ids, rows, slots.device_last, slots.device_stopped, slots.device_stop_ids,
            slots.device_seen if sees else None,
        )  # fmt: skip
        return drawn
    return plainly(slots, rows, ids, sees=sees)


def plainly(slots: Slots, rows: Tensor, ids: Tensor, *, sees: bool) -> Tensor:
    """`advance` by plain operations; what its kernel is held to."""
    last = slots.device_last.index_select(0, rows)
    stopped = slots.device_stopped.index_select(0, rows)
    drawn = torch.where(stopped, last, ids)
    hit = (drawn[:, None] == slots.device_stop_ids.index_select(0, rows)).any(dim=1)
    slots.device_stopped.index_copy_(0, rows, stopped | hit)
    slots.device_last.index_copy_(0, rows, drawn)
    if sees:
        flat = rows * slots.device_seen.shape[1] + drawn.clamp(min=0)
        slots.device_seen.view(-1).index_fill_(0, flat, True)
    return drawn


def _kernels() -> ModuleType:
    """The kernels; importing them needs triton, which only a CUDA build of torch brings."""
    return importlib.import_module("mstar_core.engine.kv.advance_kernels")
