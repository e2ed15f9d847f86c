"""Triton kernel of masks: sets the logits of forbidden ids to minus infinity. Importing it needs triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK: Final = 4096
"""Logits of one program: 128 words of a mask."""


@triton.jit
def mask_kernel(logits, masks, rows, stride, columns, words, block: tl.constexpr):
    """Mask a block of one sequence's logits, unless it has no grammar. A forbidden id has a zero bit."""
    row = tl.program_id(0)
    place = tl.load(rows + row)
    if place >= 0:
        column = tl.program_id(1) * block + tl.arange(0, block)
        inside = column < columns
        word = tl.load(masks + place.to(tl.int64) * words + column // 32, mask=inside, other=0)
        is_forbidden = ((word >> (column % 32)) & 1) == 0
        lowest = tl.full((block,), float("-inf"), tl.float32).to(logits.dtype.element_ty)
        tl.store(logits + row.to(tl.int64) * stride + column, lowest, mask=inside & is_forbidden)


def mask(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """See `masks.masked`. logits: [n, columns], changed in place, each row contiguous; masks: contiguous."""
    count, columns = logits.shape
    grid = (count, triton.cdiv(columns, BLOCK))
    mask_kernel[grid](logits, masks, rows, logits.stride(0), columns, masks.shape[1], block=BLOCK, num_warps=8)
