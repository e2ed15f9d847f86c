"""Packing of an uncaptured forward: the sequences of a step become the module's ports, positions and draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar_core.engine.steps.packed import host_positions
from mstar_core.engine.transfers import upload

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.steps.plan import DecodePlan, PassPlan
    from mstar_core.graph.declare.sampling import SamplingParams

Ports = dict[str, "Tensor | list[Tensor]"]
"""The module's inputs by keyword; a list where the shapes of batch items differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Ids to draw in one forward: those of the decode batch, then those of passes.

    forced: int64 [n], known ids to take instead, -1 for none; None for all.
    slots: int64 [n]. drawn: int64 [n], ids drawn before. ends: int64 [n], rows of the hidden states; None for all.
    """

    slots: np.ndarray
    drawn: np.ndarray
    sampling: Sequence[SamplingParams]
    ends: np.ndarray | None = None
    forced: np.ndarray | None = None

    @property
    def scores(self) -> bool:
        """Whether one of them reports log-probabilities."""
        return any(each.logprobs is not None for each in self.sampling)


def packed_ports(passes: Sequence[PassPlan], ids: Tensor | None, device: torch.device) -> Ports:
    """Return the module's ports for these passes. ids: of the decode batch before them, int64 [n] on the device."""
    first = passes[0]
    ports: Ports = {}
    for name, axis in first.axes.items():
        if name in first.per_item:
            ports[name] = _stacked([value for planned in passes for value in planned.items(name)], device)
            continue
        parts = _joined([planned.ports[name] for planned in passes], device, axis or 0)
        if ids is not None:
            parts.insert(0, ids)
        ports[name] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis or 0)
    return ports


def packed_positions(decode: DecodePlan | None, passes: Sequence[PassPlan], device: torch.device) -> Tensor:
    """Return the positions of all tokens, [T] or as a port gave them."""
    if not passes:
        assert decode is not None
        return upload(decode.positions, device)
    before = [] if decode is None else [decode.positions]
    if all(planned.given is None for planned in passes):
        parts = [*before, host_positions(passes)]
        return upload(parts[0] if len(parts) == 1 else np.concatenate(parts), device)
    tensors = [upload(each, device) for each in before]
    for planned in passes:
        tensors.append(upload(host_positions([planned]) if planned.given is None else planned.given, device))
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1)


def packed_draws(decode: DecodePlan | None, passes: Sequence[PassPlan]) -> Draws | None:
    """Return the ids to draw: for the decode batch and for the last tokens of passes that sample."""
    if not passes:
        assert decode is not None
        batch = decode.batch
        return Draws(
            slots=batch.slots,
            drawn=decode.drawn,
            sampling=batch.sampling,
            forced=decode.forced,
        )
    count = 0 if decode is None else len(decode)
    ends, at = list(range(count)), count
    for planned in passes:
        at += planned.count
        if planned.sampling is not None:
            ends.append(at - 1)
    if not ends:
        return None
    slots = np.array([planned.slot for planned in passes if planned.sampling is not None], dtype=np.int64)
    drawn = np.array([planned.drawn for planned in passes if planned.sampling is not None], dtype=np.int64)
    sampling = [planned.sampling for planned in passes if planned.sampling is not None]
    forced = np.array([planned.forced for planned in passes if planned.sampling is not None], dtype=np.int64)
    if decode is not None:
        slots = np.concatenate([decode.batch.slots, slots])
        drawn = np.concatenate([decode.drawn, drawn])
        sampling = [*decode.batch.sampling, *sampling]
        before = np.full(count, -1, dtype=np.int64) if decode.forced is None else decode.forced
        forced = np.concatenate([before, forced])
    rows = np.array(ends, dtype=np.int64) if len(ends) != at else None
    return Draws(
        slots=slots,
        drawn=drawn,
        sampling=sampling,
        ends=rows,
        forced=forced if (forced >= 0).any() else None,
    )


def packed_masks(
    decode: DecodePlan | None, passes: Sequence[PassPlan]
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Return the masks of a decode batch and of the passes behind it that sample, and the row of each sequence.

    int32 [constrained, words], and int32 [n] with -1 for a sequence without a mask. None without a grammar. Called once
    the layers are launched: the masks of a decode batch are computed here.
    """
    of_passes = [planned.mask for planned in passes if planned.sampling is not None]
    masks = [mask[None] for mask in of_passes if mask is not None]
    before = np.full(0 if decode is None else len(decode), -1, dtype=np.int32)
    if decode is not None and decode.masks is not None:
        assert decode.batch.mask_rows is not None
        before = decode.batch.mask_rows
        masks.insert(0, decode.masks.bits)
    if not masks:
        return None, None
    has_mask = np.concatenate([before >= 0, [mask is not None for mask in of_passes]])
    joined = masks[0] if len(masks) == 1 else np.concatenate(masks)
    return joined, np.where(has_mask, np.cumsum(has_mask) - 1, -1).astype(np.int32)


def _stacked(values: list[Tensor], device: torch.device) -> Tensor | list[Tensor]:
    """Return one value per batch item, stacked if their shapes agree."""
    if any(value.shape != values[0].shape for value in values):
        return [upload(value, device) for value in values]
    if all(value.is_cpu for value in values):
        return upload(torch.stack(values), device)
    return torch.stack([upload(value, device) for value in values])


def _joined(values: list[Tensor], device: torch.device, axis: int) -> list[Tensor]:
    """Return values of several passes on the device, joined into one copy if they are on the host."""
    if not all(value.is_cpu for value in values):
        return [upload(value, device) for value in values]
    return [upload(values[0].contiguous() if len(values) == 1 else torch.cat(values, dim=axis), device)]
