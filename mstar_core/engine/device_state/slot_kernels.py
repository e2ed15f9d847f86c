"""Triton kernels of slot updates: one program per sequence of a decode step. Importing them needs triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from mstar_core.layers.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

_NONE: Final = tl.constexpr(-2)
"""Equals no id: drawn ids are at least -1, which marks a missing id and pads stop lists."""


@triton.jit
def begin_kernel(last, rows, ids):
    """Load the id that a sequence reads next; 0 if it has none."""
    row = tl.program_id(0)
    tl.store(ids + row, tl.maximum(tl.load(last + tl.load(rows + row)), 0))


@triton.jit
def end_kernel(
    ids,
    rows,
    last,
    stopped,
    stop_ids,
    seen,
    drawn,
    width,
    vocab,
    block: tl.constexpr,
    sees: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Keep the last id of a stopped sequence, else take the drawn one. Compare it with the stop ids and mark it seen.

    Several padding items may share the spare slot, in no defined order.
    """
    row = tl.program_id(0)
    if overlaps:
        gdc_wait()
    slot = tl.load(rows + row)
    is_stopped = tl.load(stopped + slot) != 0
    now = tl.where(is_stopped, tl.load(last + slot), tl.load(ids + row))
    at = tl.arange(0, block)
    known = tl.load(stop_ids + slot * width + at, mask=at < width, other=_NONE)
    hits = tl.sum((known == now).to(tl.int32), axis=0)
    tl.store(stopped + slot, (is_stopped | (hits > 0)).to(tl.uint8))
    tl.store(last + slot, now)
    tl.store(drawn + row, now)
    if sees:
        # A missing id marks id 0, as the clamped index of the plain operations does.
        tl.store(seen + slot * vocab + tl.maximum(now, 0), tl.full((), 1, tl.uint8))


def next_ids(last: Tensor, rows: Tensor) -> Tensor:
    """See `DeviceSlots.next_ids`. last: int64 [slots + 1]; rows: int64 [n]."""
    ids = torch.empty_like(rows)
    begin_kernel[(len(rows),)](last, rows, ids, num_warps=1)
    return ids


def commit_ids(
    ids: Tensor, rows: Tensor, last: Tensor, stopped: Tensor, stop_ids: Tensor, seen: Tensor | None
) -> Tensor:
    """See `DeviceSlots.commit_ids`. ids, rows: int64 [n]; the others as there, contiguous, changed in place."""
    drawn = torch.empty_like(ids)
    marks = stopped if seen is None else seen
    width, vocab = stop_ids.shape[1], marks.stride(0)
    end_kernel[(len(rows),)](
        ids,
        rows,
        last,
        stopped.view(torch.uint8),
        stop_ids,
        marks.view(torch.uint8),
        drawn,
        width,
        vocab,
        block=triton.next_power_of_2(width),
        sees=seen is not None,
        num_warps=1,
        **launch_options(ids.device),
    )
    return drawn
