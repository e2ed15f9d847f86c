"""Copies of keys and values into the pages of a pool, and out of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _append_kernel(key, value, places, pool, key_stride, value_stride, page, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    place = tl.load(places + token)
    inside = (at < width) & (place >= 0)
    tl.store(pool + place * width + at, tl.load(key + token * key_stride + at, mask=inside), mask=inside)
    tl.store(pool + (place + page) * width + at, tl.load(value + token * value_stride + at, mask=inside), mask=inside)


def append(pool: Tensor, page_size: int, places: Tensor, key: Tensor, value: Tensor) -> None:
    """Append tokens to the cache.

    places: int64 [T], token slot of each key in the flat pool (its value is one page later), or -1 to skip the token.
    key, value: [T, kv_heads, head_dim], the last two dimensions contiguous.
    """
    width = key.shape[1] * key.shape[2]
    _append_kernel[(key.shape[0],)](
        key, value, places, pool, key.stride(0), value.stride(0), page_size, width, block=triton.next_power_of_2(width)
    )


TOKENS: Final = 8
"""Tokens of one program that gathers."""


@triton.jit
def _gather_kernel(
    key,
    value,
    pool,
    pages,
    keys,
    values,
    key_stride,
    value_stride,
    cached,
    total,
    width,
    page: tl.constexpr,
    tokens: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    at = tl.arange(0, block)[None, :]
    is_cached = token < cached
    number = tl.load(pages + token // page, mask=is_cached, other=0).to(tl.int64)
    held = ((number * (2 * page) + token % page) * width)[:, None] + at
    old = is_cached[:, None] & (at < width)
    new = ((token >= cached) & (token < total))[:, None] & (at < width)
    fresh = (token - cached).to(tl.int64)[:, None]
    into = token.to(tl.int64)[:, None] * width + at
    k = tl.load(pool + held, mask=old, other=0.0) + tl.load(key + fresh * key_stride + at, mask=new, other=0.0)
    tl.store(keys + into, k, mask=old | new)
    v = tl.load(pool + page * width + held, mask=old, other=0.0)
    v += tl.load(value + fresh * value_stride + at, mask=new, other=0.0)
    tl.store(values + into, v, mask=old | new)


def gather(pool: Tensor, page_size: int, pages: Tensor, cached: int, key: Tensor, value: Tensor) -> Tensor:
    """Return keys, then values, of a sequence with the new ones last: [2, cached + T, kv_heads, head_dim].

    pages: int32, its pages in order. key, value: [T, kv_heads, head_dim], the last two dimensions contiguous.
    """
    total, width = cached + key.shape[0], key.shape[1] * key.shape[2]
    out = pool.new_empty((2, total, *key.shape[1:]))
    _gather_kernel[(triton.cdiv(total, TOKENS),)](
        key,
        value,
        pool,
        pages,
        out[0],
        out[1],
        key.stride(0),
        value.stride(0),
        cached,
        total,
        width,
        page=page_size,
        tokens=TOKENS,
        block=triton.next_power_of_2(width),
        num_warps=4,
        **launch_options(pool.device),
    )
    return out
