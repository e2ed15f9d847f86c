"""Small values that lie side by side in memory, as the shares of what one pass gave its rows do.

Used where each value by itself would cost a copy: the KV engine brings them to the host together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mstar_core.engine.upload import SMALL_BYTES

if TYPE_CHECKING:
    from torch import Tensor


def stretches(values: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Divide values, in order, into stretches: which they are, and all of each as one tensor [count, ...].

    A large value is a stretch of its own: together they would only keep each other in memory.
    """
    start = 0
    for end in range(1, len(values) + 1):
        if end == len(values) or not _follows(values[end - 1], values[end]):
            first, count = values[start], end - start
            yield slice(start, end), first.as_strided((count, *first.shape), (first.numel(), *first.stride()))
            start = end


def _follows(value: Tensor, after: Tensor) -> bool:
    """Whether a value begins where another of its form ends, in the same memory."""
    return (
        value.nbytes <= SMALL_BYTES
        and value.data_ptr() + value.nbytes == after.data_ptr()
        and value.shape == after.shape
        and value.dtype is after.dtype
        and value.is_contiguous()
        and after.is_contiguous()
        and value.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    )
