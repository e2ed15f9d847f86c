"""Triton kernel that joins both experts' projections: bias, norms of heads, rotation and packed order in one pass.

Used by `language` on CUDA in half precision. Statistics are float32, and values are rounded where the layers round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_bagel.graph import MARKERS
from mstar_core.layers.kernels.elementwise import scaled
from mstar_core.layers.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import HeadNorms


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Consecutive images of one size in a pass.

    length, markers: latent tokens and markers of each; no markers if one expert computes all tokens. count: of the
    images; token, number: latent tokens and images before them.
    """

    length: int
    count: int
    token: int
    number: int
    markers: int = MARKERS


@dataclass(frozen=True, slots=True)
class Joined:
    """Queries [T, heads, head_dim], keys and values [T, kv_heads, head_dim] in packed order."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def empty(cls, tokens: int, heads: tuple[int, int], head_dim: int, *, like: Tensor) -> Joined:
        """Allocate them in the dtype and on the device of `like`. heads: of queries, and of keys and values."""
        return cls(*(like.new_empty((tokens, count, head_dim)) for count in (heads[0], heads[1], heads[1])))


@triton.jit
def _join_kernel(
    gen,
    und,
    cosine,
    sine,
    gen_query_gain,
    gen_key_gain,
    und_query_gain,
    und_key_gain,
    query,
    key,
    value,
    length,
    markers,
    first_token,
    first_image,
    part_stride,
    heads,
    kv_heads,
    eps,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    block: tl.constexpr,
    value_block: tl.constexpr,
    parts: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Program: one token. block: at least heads + kv_heads; half: head_dim / 2; parts: partial sums of markers."""
    dtype: tl.constexpr = query.dtype.element_ty
    image = tl.program_id(0) // (length + markers)
    within = tl.program_id(0) % (length + markers)
    is_und = within >= length
    across = (heads + 2 * kv_heads) * head_dim
    row = (first_token + first_image * markers + tl.program_id(0)).to(tl.int64)
    gen_row = (first_token + image * length + within).to(tl.int64)
    und_row = ((first_image + image) * markers + within - length).to(tl.int64)
    head = tl.arange(0, block)[:, None]
    at = tl.arange(0, half)[None, :]
    is_head = head < heads + kv_heads
    is_query = head < heads
    of_gen = is_head & (at < half) & (within < length)
    of_und = is_head & (at < half) & is_und
    query_gain = gen_query_gain
    key_gain = gen_key_gain
    if is_und:
        query_gain = und_query_gain
        key_gain = und_key_gain
    low = tl.where(is_query, tl.load(query_gain + at), tl.load(key_gain + at))
    high = tl.where(is_query, tl.load(query_gain + half + at), tl.load(key_gain + half + at))
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    place = head * head_dim + at
    first = tl.load(gen + gen_row * across + place, mask=of_gen, other=0.0).to(tl.float32)
    second = tl.load(gen + gen_row * across + half + place, mask=of_gen, other=0.0).to(tl.float32)
    for part in tl.static_range(parts):
        source = und + part * part_stride + und_row * across + place
        first += tl.load(source, mask=of_und, other=0.0).to(tl.float32)
        second += tl.load(source + half, mask=of_und, other=0.0).to(tl.float32)
    first = first.to(dtype).to(tl.float32)
    second = second.to(dtype).to(tl.float32)
    square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(square / head_dim + eps)[:, None]
    first = scaled(first, scale, low, dtype)
    second = scaled(second, scale, high, dtype)
    c = tl.load(cosine + row * head_dim + at)
    s = tl.load(sine + row * head_dim + at)
    turned = (first * c - second * s).to(dtype)
    other = (second * c + first * s).to(dtype)
    into = query + row * heads * head_dim + place
    tl.store(into, turned, mask=is_query & (at < half))
    tl.store(into + half, other, mask=is_query & (at < half))
    into = key + row * kv_heads * head_dim + (head - heads) * head_dim + at
    tl.store(into, turned, mask=is_head & (head >= heads) & (at < half))
    tl.store(into + half, other, mask=is_head & (head >= heads) & (at < half))
    own = tl.arange(0, value_block)
    inside = own < kv_heads * head_dim
    before = (heads + kv_heads) * head_dim
    plain = tl.load(gen + gen_row * across + before + own, mask=inside & (within < length), other=0.0).to(tl.float32)
    for part in tl.static_range(parts):
        source = und + part * part_stride + und_row * across + before + own
        plain += tl.load(source, mask=inside & is_und, other=0.0).to(tl.float32)
    tl.store(value + row * kv_heads * head_dim + own, plain.to(dtype), mask=inside)


def join_qkv(
    packed: tuple[Tensor, Tensor],
    norms: tuple[HeadNorms, HeadNorms],
    rotation: tuple[Tensor, Tensor],
    into: Joined,
    images: Images,
) -> None:
    """Normalize and rotate the fused projections of some images, and write them in packed order.

    packed: of latent tokens [T, (heads + 2 * kv_heads) * head_dim] and of markers [2 * images, ...], or float32 partial
    sums of the latter [S, ...], of all images. norms: of both. rotation: cosine and sine, float32 [T, 1, head_dim], in
    packed order. The head dimension must be a power of two.
    """
    gen, und = packed
    heads, head_dim, kv_heads = into.query.shape[1], into.query.shape[2], into.key.shape[1]
    parts = und.shape[0] if und.dim() == 3 else 1
    _join_kernel[(images.count * (images.length + images.markers),)](
        gen,
        und,
        *rotation,
        *norms[0][:2],
        *norms[1][:2],
        into.query,
        into.key,
        into.value,
        images.length,
        images.markers,
        images.token,
        images.number,
        und.shape[-2] * und.shape[-1],
        heads,
        kv_heads,
        norms[0][2],
        head_dim=head_dim,
        half=head_dim // 2,
        block=triton.next_power_of_2(heads + kv_heads),
        value_block=triton.next_power_of_2(kv_heads * head_dim),
        parts=parts,
        num_warps=8,
        **launch_options(gen.device),
    )
