"""Order of the seven ids of a frame: audio ids to code levels. Used by the vocoder node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_orpheus.checkpoint.config import IDS_PER_FRAME

if TYPE_CHECKING:
    from torch import Tensor

LEVEL_SLOTS: Final = ((0,), (1, 4), (2, 3, 5, 6))
"""Slots of a frame for the level of each codebook, in order of time."""


def codes_from_ids(ids: Tensor, audio_offset: int, codebook_size: int) -> Tensor:
    """Return the codes of whole frames, modulo the codebook size, so an id outside its slot gives a valid code.

    ids: int64 [B, 7 * frames], all at or above `audio_offset`, in slot order. Returns int64 of the same shape in
    [0, codebook_size).
    """
    return (ids - audio_offset) % codebook_size


def misplaced(ids: np.ndarray, audio_offset: int, codebook_size: int) -> np.ndarray:
    """Return a mask of the ids outside their slots. ids: int64 [B, 7 * frames]."""
    slots = np.arange(ids.shape[1]) % IDS_PER_FRAME
    code = ids - audio_offset - slots * codebook_size
    wrong: np.ndarray = (code < 0) | (code >= codebook_size)
    return wrong


def levels_from_codes(codes: Tensor) -> tuple[Tensor, ...]:
    """Split codes by codebook: int64 [B, frames * (1 | 2 | 4)] each. codes: int64 [B, 7 * frames]."""
    frames = codes.reshape(codes.shape[0], -1, IDS_PER_FRAME)
    # Indexing with a list would copy an index tensor to the GPU, which synchronizes.
    return tuple(torch.stack([frames[:, :, slot] for slot in slots], dim=2).flatten(1) for slots in LEVEL_SLOTS)
