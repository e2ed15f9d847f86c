"""Triton kernels of the rotary embedding. Used on CUDA by `nodes.linear`, `nodes.rotary` and `embed_head`.

Both lanes of a pair have separate angles. Trailing lanes without an angle are not rotated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

SOME: Final = 16
"""Heads per program."""


@triton.jit
def _pairs(line, at, inside, other: tl.constexpr, lanes: tl.constexpr):
    """Load even and odd values of a row, float32 [lanes / 2] each."""
    value = tl.load(line + at, mask=inside, other=other).to(tl.float32)
    return tl.split(tl.reshape(value, [lanes // 2, 2]))


@triton.jit
def _rotated(value, cosine, sine, width, some: tl.constexpr, lanes: tl.constexpr):
    """Rotate heads [some, lanes] by `width` cosines and sines. Returns float32."""
    at = tl.arange(0, lanes)
    c0, c1 = _pairs(cosine, at, at < width, 1.0, lanes)
    s0, s1 = _pairs(sine, at, at < width, 0.0, lanes)
    first, second = tl.split(tl.reshape(value.to(tl.float32), [some, lanes // 2, 2]))
    turned = tl.join(first * c0[None, :] - second * s0[None, :], second * c1[None, :] + first * s1[None, :])
    return tl.reshape(turned, [some, lanes])


@triton.jit
def _rotate_kernel(
    x,
    cosine,
    sine,
    token_stride,
    head_stride,
    angled,
    heads,
    width,
    head_dim: tl.constexpr,
    lanes: tl.constexpr,
    some: tl.constexpr,
    overlaps: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * some + tl.arange(0, some)
    at = tl.arange(0, lanes)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    inside = (head < heads)[:, None] & (at < head_dim)[None, :]
    here = x + token * token_stride + head[:, None] * head_stride + at[None, :]
    value = tl.load(here, mask=inside, other=0.0)
    row = (token % angled) * width
    turned = _rotated(value, cosine + row, sine + row, width, some, lanes)
    tl.store(here, turned.to(value.dtype), mask=inside)


@triton.jit
def _rotate_append_kernel(
    packed,
    cosine,
    sine,
    places,
    query,
    pool,
    across,
    angled,
    page,
    width,
    heads,
    kv_heads,
    head_dim: tl.constexpr,
    lanes: tl.constexpr,
    some: tl.constexpr,
    overlaps: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * some + tl.arange(0, some)
    at = tl.arange(0, lanes)
    place = tl.load(places + token)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    inside = (head < heads + 2 * kv_heads)[:, None] & (at < head_dim)[None, :]
    value = tl.load(packed + token * across + head[:, None] * head_dim + at[None, :], mask=inside, other=0.0)
    row = (token % angled) * width
    turned = _rotated(value, cosine + row, sine + row, width, some, lanes).to(value.dtype)
    value = tl.where((head < heads + kv_heads)[:, None], turned, value)
    # Values are one page after their keys.
    kv = tl.maximum(head - heads, 0)
    line = (place + tl.where(kv < kv_heads, 0, page)) * kv_heads + tl.where(kv < kv_heads, kv, kv - kv_heads)
    into = tl.where(head < heads, query + (token * heads + head) * head_dim, pool + line * head_dim)
    known = inside & ((head < heads) | (place >= 0))[:, None]
    tl.store(into[:, None] + at[None, :], value.to(query.dtype.element_ty), mask=known)


@triton.jit
def angles_of(time, row, column, frequencies, half, lanes: tl.constexpr):
    """Return the angle of each lane of a token: float32 [lanes]."""
    lane = tl.arange(0, lanes)
    # Each axis repeats its angles in both halves of its lanes. Remaining lanes have angle 0.
    axis = lane // (2 * half)
    place = tl.where(axis == 0, tl.load(time), tl.where(axis == 1, tl.load(row), tl.load(column)))
    return place.to(tl.float32) * tl.load(frequencies + lane % half, mask=lane < 6 * half, other=0.0)


@triton.jit
def _angles_kernel(time, row, column, frequencies, cosine, sine, half, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    angle = angles_of(time + token, row + token, column + token, frequencies, half, block)
    lane = tl.arange(0, block)
    tl.store(cosine + token * width + lane, tl.cos(angle), mask=lane < width)
    tl.store(sine + token * width + lane, tl.sin(angle), mask=lane < width)


def angles(time: Tensor, row: Tensor, column: Tensor, frequencies: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Compute `Rotary3D` for all lanes of a head; remaining lanes have angle 0.

    time, row, column: int64 [..., T], contiguous. Returns float32 [..., T, 1, head_dim] twice.
    """
    tokens, half = time.numel(), len(frequencies)
    cosine, sine = torch.empty((2, *time.shape, 1, head_dim), dtype=torch.float32, device=time.device).unbind()
    block = triton.next_power_of_2(head_dim)
    _angles_kernel[(tokens,)](time, row, column, frequencies, cosine, sine, half, head_dim, block=block, num_warps=1)
    return cosine, sine


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate heads in place. x: [..., T, heads, head_dim], evenly strided tokens, contiguous lanes, an even number of
    them.

    cosine, sine: float32 [..., T, 1, lanes], contiguous, shared by leading axes. Returns x.
    """
    heads, head_dim = x.shape[-2:]
    width = cosine.shape[-1]
    _rotate_kernel[(x.shape[:-2].numel(), triton.cdiv(heads, SOME))](
        x,
        cosine,
        sine,
        x.stride(-3),
        x.stride(-2),
        cosine.numel() // width,
        heads,
        width,
        head_dim=head_dim,
        lanes=triton.next_power_of_2(head_dim),
        some=SOME,
        num_warps=4,
        **launch_options(x.device),
    )
    return x


def rotate_append(pool: Tensor, places: Tensor, packed: Tensor, rotation: tuple[Tensor, Tensor], heads: int) -> Tensor:
    """Rotate queries and keys of joined projections, and store keys and values. Returns queries [T, heads, head_dim].

    pool: as from `make_pools`; places: int64 [T], slot of each key in the flattened pool, -1 = none; packed: [T, (heads
    + 2 * kv_heads) * head_dim], contiguous, queries first; rotation: cosine and sine, as for `rotate`.
    """
    tokens, across = packed.shape
    page, kv_heads, head_dim = pool.shape[2:]
    cosine, sine = rotation
    width = cosine.shape[-1]
    query = torch.empty((tokens, heads, head_dim), dtype=pool.dtype, device=packed.device)
    _rotate_append_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, SOME))](
        packed,
        cosine,
        sine,
        places,
        query,
        pool,
        across,
        cosine.numel() // width,
        page,
        width,
        heads,
        kv_heads,
        head_dim=head_dim,
        lanes=triton.next_power_of_2(head_dim),
        some=SOME,
        num_warps=4,
        **launch_options(packed.device),
    )
    return query
