"""Decode attention: one kernel normalizes heads if asked, rotates, appends and attends one token per sequence.

Used by captured decode steps.

The keys of a sequence are split into enough chunks to fill the device (split-KV). The last program to finish combines
the chunks in order, so equal inputs give equal bits. Lengths and pages are read on the device, without a plan on the
host. Cached keys and values are prefetched while the projections before still run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.kernels.elementwise import scaled, sum_partials
from mstar_core.layers.kernels.launch import launch_options, prefetch_l2_where

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from mstar_core.layers.kv_view import HeadNorms

PROGRAMS: Final = 512
"""Target number of programs: four for each multiprocessor of an H100."""

MAX_CHUNKS: Final = 16
KEYS: Final = 32
"""Keys per iteration of the inner loop."""

NARROW: Final = 128
"""Widest head whose program is one warp with three tiles of keys in flight: many small programs read fastest."""

MAX_GROUPS: Final = 16
"""Most query heads per KV head: the rows of one MMA instruction."""

_LOG2E: Final = 1.4426950408889634


@triton.jit
def decode_kernel(
    packed,
    cosine,
    sine,
    pool,
    out,
    starts,
    pages,
    last,
    places,
    partial,
    arrived,
    query_gain,
    key_gain,
    factor,
    eps,
    across,
    kv_heads,
    groups: tl.constexpr,
    width: tl.constexpr,
    page: tl.constexpr,
    parts: tl.constexpr,
    chunks: tl.constexpr,
    keys: tl.constexpr,
    padded: tl.constexpr,
    has_norms: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Normalize, rotate, append and attend. Grid: (sequences, kv_heads, chunks)."""
    sequence, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    half: tl.constexpr = width // 2
    dtype: tl.constexpr = pool.dtype.element_ty
    line = kv_heads * width
    first_page = tl.load(starts + sequence)
    cached = (tl.load(starts + sequence + 1) - first_page - 1) * page + tl.load(last + sequence) - 1
    place = tl.load(places + sequence)
    size = tl.cdiv(tl.cdiv(cached, chunks), page) * page
    begin = chunk * size
    end = tl.minimum(begin + size, cached)
    head_pool = pool + head * width
    key_at = tl.arange(0, keys)
    if overlaps:
        gdc_launch_dependents()
        # Earlier steps wrote these tokens, so there is no need to wait for this step's kernels.
        at = begin + key_at
        inside = at < end
        number = tl.load(pages + first_page + at // page, mask=inside, other=0).to(tl.int64)
        lines = head_pool + (number * (2 * page) + at % page) * line
        prefetch_l2_where(lines, inside, width * 2)
        prefetch_l2_where(lines + page * line, inside, width * 2)
        gdc_wait()

    group = tl.arange(0, padded)
    low = tl.arange(0, half)
    stride = tl.num_programs(0).to(tl.int64) * across
    source = packed + sequence.to(tl.int64) * across
    c = tl.load(cosine + sequence * width + low)
    s = tl.load(sine + sequence * width + low)
    known = (group < groups)[:, None] & (low >= 0)[None, :]
    at_query = (head * groups + group)[:, None] * width + low[None, :]
    first = sum_partials(source, stride, at_query, known, parts, dtype)
    second = sum_partials(source, stride, at_query + half, known, parts, dtype)
    if has_norms:
        scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / width + eps)[:, None]
        first = scaled(first, scale, tl.load(query_gain + low)[None, :], dtype)
        second = scaled(second, scale, tl.load(query_gain + half + low)[None, :], dtype)
    q_first = (first * c[None, :] - second * s[None, :]).to(dtype)
    q_second = (second * c[None, :] + first * s[None, :]).to(dtype)

    top = tl.full((padded,), -1.0e30, tl.float32)
    total = tl.zeros((padded,), tl.float32)
    at = tl.arange(0, width)
    mixed = tl.zeros((padded, width), tl.float32)
    if chunk == 0:
        # The new token: append its key and value, and attend to it first.
        at_key = (kv_heads * groups + head) * width + low
        all_low = low >= 0
        new_first = sum_partials(source, stride, at_key, all_low, parts, dtype)
        new_second = sum_partials(source, stride, at_key + half, all_low, parts, dtype)
        if has_norms:
            squares = tl.sum(new_first * new_first, axis=0) + tl.sum(new_second * new_second, axis=0)
            key_scale = tl.rsqrt(squares / width + eps)
            new_first = scaled(new_first, key_scale, tl.load(key_gain + low), dtype)
            new_second = scaled(new_second, key_scale, tl.load(key_gain + half + low), dtype)
        k_first = (new_first * c - new_second * s).to(dtype)
        k_second = (new_second * c + new_first * s).to(dtype)
        value = sum_partials(source, stride, (kv_heads * (groups + 1) + head) * width + at, at >= 0, parts, dtype)
        into = head_pool + place * line
        tl.store(into + low, k_first, mask=all_low & (place >= 0))
        tl.store(into + half + low, k_second, mask=all_low & (place >= 0))
        tl.store(into + page * line + at, value.to(dtype), mask=(at >= 0) & (place >= 0))
        own_score = tl.sum(q_first.to(tl.float32) * k_first.to(tl.float32)[None, :], axis=1)
        own_score += tl.sum(q_second.to(tl.float32) * k_second.to(tl.float32)[None, :], axis=1)
        top = own_score * factor
        total += 1.0
        mixed += value[None, :]

    for start in tl.range(begin, end, keys):
        place_of = start + key_at
        seen = place_of < end
        number_of = tl.load(pages + first_page + place_of // page, mask=seen, other=0).to(tl.int64)
        offset = (number_of * (2 * page) + place_of % page) * line
        k_at = head_pool + offset[None, :] + low[:, None]
        score = tl.dot(q_first, tl.load(k_at, mask=seen[None, :], other=0.0))
        score = tl.dot(q_second, tl.load(k_at + half, mask=seen[None, :], other=0.0), score) * factor
        score = tl.where(seen[None, :], score, -1.0e30)
        v = tl.load(head_pool + offset[:, None] + page * line + at[None, :], mask=seen[:, None], other=0.0)
        higher = tl.maximum(top, tl.max(score, axis=1))
        share = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(share, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(share.to(dtype), v)
        top = higher

    output = out + (sequence.to(tl.int64) * kv_heads + head) * groups * width
    stored = (group < groups)[:, None] & (at >= 0)[None, :]
    if chunks == 1:
        tl.store(output + group[:, None] * width + at[None, :], (mixed / total[:, None]).to(dtype), mask=stored)
    else:
        # Per chunk and query head: `width` weighted sums, then the total and the maximum.
        here = partial + (sequence * kv_heads + head).to(tl.int64) * (chunks * groups * (width + 2))
        mine = here + (chunk * groups + group) * (width + 2)
        tl.store(mine[:, None] + at[None, :], mixed, mask=stored)
        tl.store(mine + width, total, mask=group < groups)
        tl.store(mine + width + 1, top, mask=group < groups)
        tl.debug_barrier()
        turn = tl.atomic_add(arrived + sequence * kv_heads + head, 1, sem="acq_rel", scope="gpu")
        if turn == chunks - 1:
            tl.debug_barrier()
            # All query heads at once: a loop over them would wait for memory once for each.
            part = tl.arange(0, chunks)
            ends = here + (part[None, :] * groups + group[:, None]) * (width + 2) + width
            is_head = (group < groups)[:, None] & (part >= 0)[None, :]
            sums = tl.load(ends, mask=is_head, other=1.0, cache_modifier=".cg")
            tops = tl.load(ends + 1, mask=is_head, other=0.0, cache_modifier=".cg")
            weight = tl.exp2(tops - tl.max(tops, axis=1)[:, None])
            weight /= tl.sum(sums * weight, axis=1)[:, None]
            result = tl.zeros((padded, width), tl.float32)
            for one in tl.static_range(chunks):
                lane = here + (one * groups + group) * (width + 2)
                rows = tl.load(lane[:, None] + at[None, :], mask=stored, other=0.0, cache_modifier=".cg")
                result += rows * tl.sum(tl.where(part[None, :] == one, weight, 0.0), axis=1)[:, None]
            tl.store(output + group[:, None] * width + at[None, :], result.to(dtype), mask=stored)
            tl.store(arrived + sequence * kv_heads + head, 0)


class DecodeAttention:
    """The decode kernel and its scratch memory, for one bucket of sequences. Owned by the bucket's view.

    pool: of any layer, [pages, 2, page, kv_heads, head_dim]. The layers run in sequence and share the scratch memory.
    """

    def __init__(self, sequences: int, heads: int, pool: Tensor) -> None:
        _, _, self._page, kv_heads, self._width = pool.shape
        self._groups = heads // kv_heads
        self._chunks = chunks_of(sequences, kv_heads)
        size = sequences * heads * self._chunks * (self._width + 2)
        self._partial = torch.empty(size, dtype=torch.float32, device=pool.device)
        self._arrived = torch.zeros(sequences * kv_heads, dtype=torch.int32, device=pool.device)

    def attend(
        self,
        pool: Tensor,
        packed: Tensor,
        rotation: tuple[Tensor, Tensor],
        fields: Mapping[str, Tensor],
        scale: float,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """See PackedView. fields: the backend's `starts`, `pages`, `last` and `places`."""
        sequences, across, kv_heads = packed.shape[-2], packed.shape[-1], pool.shape[3]
        heads = self._groups * kv_heads
        out = torch.empty((sequences, heads, self._width), dtype=pool.dtype, device=pool.device)
        query_gain, key_gain, eps = norms or (pool, pool, 0.0)
        decode_kernel[(sequences, kv_heads, self._chunks)](
            packed,
            *rotation,
            pool,
            out,
            fields["starts"],
            fields["pages"],
            fields["last"],
            fields["places"],
            self._partial,
            self._arrived,
            query_gain,
            key_gain,
            scale * _LOG2E,
            eps,
            across,
            kv_heads,
            groups=self._groups,
            width=self._width,
            page=self._page,
            parts=packed.shape[0] if packed.dim() == 3 else 1,
            chunks=self._chunks,
            keys=KEYS,
            padded=MAX_GROUPS,
            has_norms=norms is not None,
            num_warps=1 if self._width <= NARROW else 4,
            num_stages=3 if self._width <= NARROW else 2,
            **launch_options(pool.device),
        )
        return out


def chunks_of(sequences: int, kv_heads: int) -> int:
    """Return into how many chunks the keys of each sequence are split: a power of two."""
    chunks = max(1, min(MAX_CHUNKS, PROGRAMS // (sequences * kv_heads)))
    return 1 << (chunks.bit_length() - 1)


def supports(heads: int, pool: Tensor) -> bool:
    """Return whether the kernel supports this number of query heads and this cache."""
    page, kv_heads, width = pool.shape[2:]
    known = heads % kv_heads == 0 and heads // kv_heads <= MAX_GROUPS and width in (64, 128, 256)
    return known and pool.dtype in (torch.bfloat16, torch.float16) and page & (page - 1) == 0
