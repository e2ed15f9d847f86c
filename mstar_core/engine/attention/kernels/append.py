"""Kernel that appends keys and values to the paged KV cache. Used by the CUDA attention backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _append_kernel(key, value, places, pool, key_stride, value_stride, page, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    place = tl.load(places + row)
    inside = (at < width) & (place >= 0)
    tl.store(pool + place * width + at, tl.load(key + row * key_stride + at, mask=inside), mask=inside)
    tl.store(pool + (place + page) * width + at, tl.load(value + row * value_stride + at, mask=inside), mask=inside)


def append(pool: Tensor, page_size: int, places: Tensor, key: Tensor, value: Tensor) -> None:
    """Append tokens to the cache.

    places: int64 [T], token slot of each key in the flat pool (its value is one page later), or -1 to skip the token.
    key, value: [T, kv_heads, head_dim], the last two dimensions contiguous.
    """
    width = key.shape[1] * key.shape[2]
    _append_kernel[(key.shape[0],)](
        key, value, places, pool, key.stride(0), value.stride(0), page_size, width, block=triton.next_power_of_2(width)
    )
