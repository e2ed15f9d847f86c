"""Prefill attention (causal) of captured buckets on CUDA, with fixed grids and without a plan on the host.

Paged: chunks of prompts attend to the pages. A tile is some tokens of one chunk and one query head; it gives its first
token, and the page table of its sequence gives its keys. Unused tiles do nothing, and unused tokens get zeros.

Packed: passes without cached tokens. One kernel rotates and appends, another attends; a tile reads the keys of its own
pass from the projections' output. Sums have a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.engine.attention.kernels.page_copies import append
from mstar_core.engine.attention.kernels.tile_heuristics import tiles_of
from mstar_core.engine.attention.static import LOG2E, StaticAttention
from mstar_core.layers.kernels.elementwise import scaled
from mstar_core.layers.kernels.launch import has_large_shared_memory, launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.staging import Fields, Values
    from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
    from mstar_core.layers.kv_view import HeadNorms

KEYS: Final = 64
"""Keys per iteration of the inner loop."""

SMALL_PAGED_BUCKET: Final = 256
"""Buckets up to this many tokens use small tiles, because large ones would not fill the device."""


@triton.jit
def _paged_prefill_kernel(
    query,
    pool,
    out,
    tile_row,
    tile_start,
    tile_count,
    tile_cached,
    tables,
    scale,
    query_stride,
    out_stride,
    max_pages,
    kv_heads,
    groups,
    page: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    keys: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(tile_count + tile)
    if count > 0:
        row = tl.load(tile_row + tile)
        first = tl.load(tile_start + tile).to(tl.int64)
        cached = tl.load(tile_cached + tile)
        token = tl.arange(0, block)
        at = tl.arange(0, width)
        inside = token < count
        store = out + (first + token[:, None]) * out_stride + head * width + at[None, :]
        if row < 0:
            tl.store(store, tl.zeros((block, width), out.dtype.element_ty), mask=inside[:, None])
        else:
            load = query + (first + token[:, None]) * query_stride + head * width + at[None, :]
            q = tl.load(load, mask=inside[:, None], other=0.0)
            top = tl.full((block,), -1.0e30, tl.float32)
            total = tl.zeros((block,), tl.float32)
            mixed = tl.zeros((block, width), tl.float32)
            end = cached + count
            line = kv_heads * width
            head_pool = pool + (head // groups) * width
            for start in range(0, end, keys):
                place = start + tl.arange(0, keys)
                known = place < end
                number = tl.load(tables + row * max_pages + place // page, mask=known, other=0).to(tl.int64)
                offset = (number * (2 * page) + place % page) * line
                k = tl.load(head_pool + offset[None, :] + at[:, None], mask=known[None, :], other=0.0)
                score = tl.dot(q, k) * scale
                score = tl.where(place[None, :] <= (cached + token)[:, None], score, -1.0e30)
                higher = tl.maximum(top, tl.max(score, axis=1))
                share = tl.exp2(score - higher[:, None])
                shrink = tl.exp2(top - higher)
                total = total * shrink + tl.sum(share, axis=1)
                v = tl.load(head_pool + offset[:, None] + page * line + at[None, :], mask=known[:, None], other=0.0)
                mixed = mixed * shrink[:, None] + tl.dot(share.to(v.dtype), v)
                top = higher
            tl.store(store, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


class PagedPrefillAttention(StaticAttention):
    """Prefill attention of one bucket: one append and one attention kernel per layer."""

    def __init__(self, pools: list[Tensor], page_size: int, shape: AttentionShape) -> None:
        super().__init__(pools, page_size, shape)
        self._block = 32 if shape.tokens <= SMALL_PAGED_BUCKET else 64
        # Each chunk, and the unused rest of the bucket, may end in a partial tile.
        self._tiles = -(-shape.tokens // self._block) + shape.sequences

    @property
    def fields(self) -> Fields:
        """See StaticAttention. row, start, count, cached: sequence, first token, tokens and cached tokens of a tile."""
        tiles = {name: (torch.int32, self._tiles) for name in ("row", "start", "count", "cached")}
        places = {"places": (torch.int64, self._shape.tokens)}
        return {**places, **tiles, "tables": (torch.int32, self._shape.sequences * self._shape.pages)}

    def values(self, metadata: AttentionMetadata) -> Values:
        """See StaticAttention."""
        chunks, shape = len(metadata.page_rows), self._shape
        of, within, count = tiles_of(metadata, shape.tokens, self._block)
        widest = -(-int(metadata.lengths_after.max(initial=0)) // self._page_size)
        tables = np.zeros((chunks, shape.pages), dtype=np.int32)
        tables[:, :widest] = metadata.tables[metadata.page_rows, :widest]
        return {
            "places": metadata.places(self._page_size, shape.tokens, -1),
            "row": np.where(of < chunks, of, -1),
            "start": metadata.query_starts[of] + within,
            "count": count,
            "cached": np.append(metadata.lengths, 0)[of] + within,
            "tables": tables,
        }

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        pool, fields = self._pools[layer], self._device
        append(pool, self._page_size, fields["places"], key, value)
        heads, width = query.shape[1:]
        out = torch.empty((self._shape.tokens, heads, width), dtype=query.dtype, device=query.device)
        factor = (width**-0.5 if scale is None else scale) * LOG2E
        _paged_prefill_kernel[(self._tiles, heads)](
            query,
            pool,
            out,
            fields["row"],
            fields["start"],
            fields["count"],
            fields["cached"],
            fields["tables"],
            factor,
            query.stride(0),
            out.stride(0),
            self._shape.pages,
            pool.shape[3],
            heads // pool.shape[3],
            page=self._page_size,
            width=width,
            block=self._block,
            keys=KEYS,
            num_warps=4,
            num_stages=2,
        )
        return out


SMALL_PACKED_BUCKET: Final = 1024
"""Buckets up to this many tokens use tiles of 64, which fill an H100 with eight heads. Longer ones use 128, if a
program has the 192 KiB of shared memory that heads of 256 need."""


@triton.jit
def _packed_prefill_kernel(
    query,
    key,
    value,
    out,
    tile_start,
    tile_count,
    tile_first,
    tile_end,
    scale,
    query_stride,
    key_stride,
    value_stride,
    out_stride,
    groups,
    width: tl.constexpr,
    block: tl.constexpr,
    keys: tl.constexpr,
    overlaps: tl.constexpr,
):
    tile = tl.program_id(1)
    head = tl.program_id(0)
    if overlaps:
        gdc_launch_dependents()
    count = tl.load(tile_count + tile)
    first = tl.load(tile_first + tile)
    end = tl.load(tile_end + tile)
    start = tl.load(tile_start + tile).to(tl.int64)
    if overlaps:
        gdc_wait()
    if count > 0:
        token = tl.arange(0, block)
        at = tl.arange(0, width)
        inside = token < count
        load = query + (start + token[:, None]) * query_stride + head * width + at[None, :]
        q = tl.load(load, mask=inside[:, None], other=0.0)
        top = tl.full((block,), -1.0e30, tl.float32)
        total = tl.zeros((block,), tl.float32)
        mixed = tl.zeros((block, width), tl.float32)
        keys_at = key + (head // groups) * width + at[:, None]
        values_at = value + (head // groups) * width + at[None, :]
        place = tl.arange(0, keys)
        for begin in range(first, end, keys):
            # Past its end a pass reads its last token again, so loads need no mask, the maximum is unchanged, and no
            # other pass is read. Offsets are 32-bit: a bucket has far fewer than 2^31 values, and registers are scarce.
            line = tl.minimum(begin + place, end - 1)
            k = tl.load(keys_at + line[None, :] * key_stride)
            v = tl.load(values_at + line[:, None] * value_stride)
            score = tl.dot(q, k) * scale
            higher = tl.maximum(top, tl.max(score, axis=1))
            share = tl.where((begin + place < end)[None, :], tl.exp2(score - higher[:, None]), 0.0)
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(share, axis=1)
            mixed = tl.dot(share.to(v.dtype), v, mixed * shrink[:, None])
            top = higher
        # Unused tokens have no keys and get zeros.
        output = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
        store = out + (start + token[:, None]) * out_stride + head * width + at[None, :]
        tl.store(store, output.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _rotate_append_kernel(
    packed,
    cosine,
    sine,
    places,
    pool,
    query,
    key,
    query_gain,
    key_gain,
    row_stride,
    page,
    heads,
    kv_heads,
    eps,
    width: tl.constexpr,
    half: tl.constexpr,
    lines: tl.constexpr,
    has_norms: tl.constexpr,
    overlaps: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if overlaps:
        gdc_launch_dependents()
    line = tl.arange(0, lines)[:, None]
    at = tl.arange(0, half)[None, :]
    c = tl.load(cosine + token * width + at)
    s = tl.load(sine + token * width + at)
    place = tl.load(places + token)
    if overlaps:
        gdc_wait()
    inside = line < heads + 2 * kv_heads
    source = packed + token * row_stride + line * width + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    turns = line < heads + kv_heads
    if has_norms:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / width + eps)[:, None]
        low = tl.where(line < heads, tl.load(query_gain + at), tl.load(key_gain + at))
        high = tl.where(line < heads, tl.load(query_gain + half + at), tl.load(key_gain + half + at))
        first = tl.where(turns, scaled(first, scale, low, query.dtype.element_ty), first)
        second = tl.where(turns, scaled(second, scale, high, query.dtype.element_ty), second)
    turned = tl.where(turns, first * c - second * s, first).to(query.dtype.element_ty)
    behind = tl.where(turns, second * c + first * s, second).to(query.dtype.element_ty)
    asks = line < heads
    into = query + (token * heads + line) * width + at
    tl.store(into, turned, mask=asks)
    tl.store(into + half, behind, mask=asks)
    is_key = (line >= heads) & turns
    into = key + (token * kv_heads + line - heads) * width + at
    tl.store(into, turned, mask=is_key)
    tl.store(into + half, behind, mask=is_key)
    # A page stores its keys before its values.
    is_value = (line >= heads + kv_heads) & inside
    at_page = tl.where(is_value, (place + page) * kv_heads + line - heads - kv_heads, place * kv_heads + line - heads)
    kept = (line >= heads) & inside & (place >= 0)
    tl.store(pool + at_page * width + at, turned, mask=kept)
    tl.store(pool + at_page * width + at + half, behind, mask=kept)


class PackedPrefillAttention(StaticAttention):
    """Packed prefill attention of one bucket: passes of any lengths on empty caches."""

    def __init__(self, pools: list[Tensor], page_size: int, shape: AttentionShape) -> None:
        super().__init__(pools, page_size, shape)
        self._block = 128 if shape.tokens > SMALL_PACKED_BUCKET and has_large_shared_memory(pools[0].device) else 64
        # Each pass, and the unused rest of the bucket, may end in a partial tile.
        self._tiles = -(-shape.tokens // self._block) + shape.sequences

    @property
    def fields(self) -> Fields:
        """See StaticAttention. first, end: tokens of the tile's pass; start, count: tokens of the tile."""
        tiles = {name: (torch.int32, self._tiles) for name in ("start", "count", "first", "end")}
        return {"places": (torch.int64, self._shape.tokens), **tiles}

    def values(self, metadata: AttentionMetadata) -> Values:
        """See StaticAttention. Unused tiles have no tokens; tiles of unused tokens have no keys."""
        starts = metadata.query_starts
        of, within, count = tiles_of(metadata, self._shape.tokens, self._block)
        return {
            "places": metadata.places(self._page_size, self._shape.tokens, -1),
            "start": starts[of] + within,
            "count": count,
            "first": starts[of],
            "end": np.append(starts[1:], starts[-1])[of],
        }

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView. The last two dimensions of each are contiguous."""
        self.keep(layer, key, value)
        return self._attended(query, key, value, scale)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See KeepingView."""
        append(self._pools[layer], self._page_size, self._device["places"], key, value)

    def attend_packed(
        self,
        layer: int,
        packed: Tensor,
        rotation: tuple[Tensor, Tensor],
        heads: int,
        scale: float | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor | None:
        """See PackedView."""
        pool, width = self._pools[layer], rotation[0].shape[-1]
        kv_heads, half = pool.shape[3], width // 2
        if packed.dim() != 2 or packed.dtype != pool.dtype or width != pool.shape[4] or half & (half - 1):
            return None
        tokens = packed.shape[0]
        query, key = packed.new_empty((tokens, heads, width)), packed.new_empty((tokens, kv_heads, width))
        query_gain, key_gain, eps = norms or (pool, pool, 0.0)
        _rotate_append_kernel[(tokens,)](
            packed,
            *rotation,
            self._device["places"],
            pool,
            query,
            key,
            query_gain,
            key_gain,
            packed.stride(0),
            self._page_size,
            heads,
            kv_heads,
            eps,
            width=width,
            half=half,
            lines=triton.next_power_of_2(heads + 2 * kv_heads),
            has_norms=norms is not None,
            num_warps=4,
            **launch_options(packed.device),
        )
        value = packed[:, (heads + kv_heads) * width :].view(tokens, kv_heads, width)
        return self._attended(query, key, value, scale)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        tokens, heads, width = query.shape
        out = torch.empty((tokens, heads, width), dtype=query.dtype, device=query.device)
        tile = self._device
        _packed_prefill_kernel[(heads, len(tile["start"]))](
            query,
            key,
            value,
            out,
            tile["start"],
            tile["count"],
            tile["first"],
            tile["end"],
            (width**-0.5 if scale is None else scale) * LOG2E,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            out.stride(0),
            heads // key.shape[1],
            width=width,
            block=self._block,
            keys=KEYS,
            num_warps=self._block // 16,
            num_stages=2,
            **launch_options(query.device),
        )
        return out
