"""Audio ids to code levels: the order of the seven ids of a frame. Used by the vocoder node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_orpheus.config import IDS_PER_FRAME

if TYPE_CHECKING:
    from torch import Tensor

LEVEL_SLOTS: Final = ((0,), (1, 4), (2, 3, 5, 6))
"""Slots of a frame that make up each code book's level, in order of time."""


def codes_from_ids(ids: Tensor, audio_offset: int, codebook_size: int) -> Tensor:
    """Codes of whole frames, by the modulo rule: an id outside its slot still gives a legal code.

    ids: int64 [B, 7 * frames], all at or above `audio_offset`, slot order. Returns int64 of the same shape,
    each in [0, codebook_size).
    """
    return (ids - audio_offset) % codebook_size


def misplaced(ids: np.ndarray, audio_offset: int, codebook_size: int) -> np.ndarray:
    """Which ids left the slot order: bool, shape of `ids`, int64 [B, 7 * frames]."""
    slots = np.arange(ids.shape[1]) % IDS_PER_FRAME
    code = ids - audio_offset - slots * codebook_size
    wrong: np.ndarray = (code < 0) | (code >= codebook_size)
    return wrong


def levels_from_codes(codes: Tensor) -> tuple[Tensor, ...]:
    """Split codes by code book. codes: int64 [B, 7 * frames]. Returns int64 [B, frames * (1 | 2 | 4)] each."""
    frames = codes.reshape(codes.shape[0], -1, IDS_PER_FRAME)
    # Picked one by one: a list as an index becomes a tensor, and its copy to a GPU waits for what is queued there.
    return tuple(torch.stack([frames[:, :, slot] for slot in slots], dim=2).flatten(1) for slots in LEVEL_SLOTS)
