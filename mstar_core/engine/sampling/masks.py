"""Masks of constrained sequences: ids that their grammars forbid get logits of minus infinity.

A mask has one bit per id, in words of 32. Sequences without a grammar have no mask, and their logits are not touched.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.staging import Fields
    from mstar_core.engine.sampling.logit_subset import LogitSubset

MASKS, MASK_ROWS = "masks", "mask_rows"
"""Names of the masks (int32 [constrained, words]) and of their rows (int32 [n]) among the columns of a draw."""

WORD_BITS: Final = 32


@lru_cache(maxsize=64)
def allowed_bits(suppress: tuple[range, ...], vocab: int) -> np.ndarray:
    """Return the mask without these ids, see PassPlan. int32 [words]."""
    allowed = np.zeros(-(-vocab // WORD_BITS) * WORD_BITS, dtype=np.bool_)
    allowed[:vocab] = True
    for span in suppress:
        allowed[span.start : span.stop : span.step] = False
    bits: np.ndarray = np.packbits(allowed, bitorder="little").view(np.int32)
    return bits


def fields(count: int, vocab: int) -> Fields:
    """Return the staging field of the masks of up to `count` sequences."""
    return {MASKS: (torch.int32, count * -(-vocab // WORD_BITS))}


def padded_rows(rows: np.ndarray | None, count: int) -> dict[str, np.ndarray]:
    """Return the rows of `count` sequences. rows: int32, of the first ones; the others are padding without a mask."""
    padded = np.full(count, -1, dtype=np.int32)
    if rows is not None:
        padded[: len(rows)] = rows
    return {MASK_ROWS: padded}


def masked(logits: Tensor, masks: Tensor, rows: Tensor, subset: LogitSubset) -> Tensor:
    """Set the logits of forbidden ids to minus infinity, in place. Returns the logits.

    logits: [n, columns] of any float type. masks: int32 [constrained, words]. rows: int32 [n], the mask of each
    sequence, -1 for one without.
    """
    if logits.is_cuda and not subset.are_some:
        importlib.import_module("mstar_core.engine.sampling.mask_kernel").mask(logits, masks, rows)
        return logits
    return masked_plainly(logits, masks, rows, subset)


def masked_plainly(logits: Tensor, masks: Tensor, rows: Tensor, subset: LogitSubset) -> Tensor:
    """Do the same by plain operations of fixed shapes: the reference of the kernel, and its part for cut heads."""
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=masks.device)
    words = masks.index_select(0, rows.clamp(min=0))
    allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)
    allowed = subset.select(allowed)[:, : logits.shape[1]]
    return logits.masked_fill_(~(allowed | (rows < 0)[:, None]), float("-inf"))
