"""Alignment of ids with the sound, from the attention of a few heads. Source: `transformers`, token timestamps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import pad

if TYPE_CHECKING:
    from torch import Tensor


def alignment(weights: Tensor, median_width: int) -> Tensor:
    """Return the mean over heads of normalized and smoothed attention, [ids, states]. weights: [heads, ids, states]."""
    if not weights.shape[1]:
        return weights.mean(dim=0)
    mean, std = weights.mean(dim=-2, keepdim=True), weights.std(dim=-2, keepdim=True, unbiased=False)
    # A single id has no deviation: its normalized attention is 0.
    return smoothed((weights - mean) / std.clamp(min=1e-30), median_width).mean(dim=0)


def smoothed(values: Tensor, width: int) -> Tensor:
    """Return the running median along the last dimension, mirrored at its ends."""
    side = width // 2
    if values.shape[-1] <= side:
        return values
    return pad(values, (side, side), mode="reflect").unfold(-1, width, 1).sort(-1).values[..., side]
