"""Paged prefill attention (causal) over packed prompt chunks, in one kernel with a fixed grid. For captured prefill.

A tile is some tokens of one chunk and one query head. Unused tiles do nothing, and unused tokens get zeros. There is no
plan on the host: a tile gives its first token, and the row's page table gives its keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import triton
import triton.language as tl

from mstar_core.engine.attention.kernels.append import append
from mstar_core.engine.attention.kernels.tile_heuristics import tiles_of
from mstar_core.engine.attention.static import LOG2E, PagedKernels

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.staging import Fields, Values
    from mstar_core.engine.attention.static import AttentionBatch, AttentionShape

KEYS: Final = 64
"""Keys per iteration of the inner loop."""

SHORT: Final = 256
"""Buckets up to this many tokens use small tiles, because large ones would not fill the device."""


@triton.jit
def _paged_prefill_kernel(
    query, pool, out, tile_row, tile_start, tile_count, tile_cached, tables, scale, query_stride, out_stride,
    max_pages, kv_heads, groups, page: tl.constexpr, width: tl.constexpr, block: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
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
            own = pool + (head // groups) * width
            for start in range(0, end, keys):
                place = start + tl.arange(0, keys)
                known = place < end
                number = tl.load(tables + row * max_pages + place // page, mask=known, other=0).to(tl.int64)
                offset = (number * (2 * page) + place % page) * line
                k = tl.load(own + offset[None, :] + at[:, None], mask=known[None, :], other=0.0)
                score = tl.dot(q, k) * scale
                score = tl.where(place[None, :] <= (cached + token)[:, None], score, -1.0e30)
                higher = tl.maximum(top, tl.max(score, axis=1))
                share = tl.exp2(score - higher[:, None])
                shrink = tl.exp2(top - higher)
                total = total * shrink + tl.sum(share, axis=1)
                v = tl.load(own + offset[:, None] + page * line + at[None, :], mask=known[:, None], other=0.0)
                mixed = mixed * shrink[:, None] + tl.dot(share.to(v.dtype), v)
                top = higher
            tl.store(store, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


class PagedPrefillAttention(PagedKernels):
    """Prefill attention of one bucket: one append and one attention kernel per layer."""

    def __init__(self, pools: list[Tensor], page_size: int, shape: AttentionShape) -> None:
        super().__init__(pools, page_size, shape)
        self._block = 32 if shape.tokens <= SHORT else 64
        # Each chunk, and the unused rest of the bucket, may end in a partial tile.
        self._tiles = -(-shape.tokens // self._block) + shape.rows

    @property
    def fields(self) -> Fields:
        """See StaticAttention. row, start, count, cached: sequence, first token, tokens and cached tokens of a tile."""
        tiles = {name: (torch.int32, self._tiles) for name in ("row", "start", "count", "cached")}
        places = {"places": (torch.int64, self._shape.tokens)}
        return {**places, **tiles, "tables": (torch.int32, self._shape.rows * self._shape.pages)}

    def values(self, batch: AttentionBatch) -> Values:
        """See StaticAttention."""
        chunks, shape = len(batch.rows), self._shape
        of, within, count = tiles_of(batch, shape.tokens, self._block)
        widest = int((-(-(batch.cached + batch.counts) // self._page_size)).max(initial=0))
        tables = np.zeros((chunks, shape.pages), dtype=np.int32)
        tables[:, :widest] = batch.tables[batch.rows, :widest]
        return {
            "places": batch.places(self._page_size, shape, -1),
            "row": np.where(of < chunks, of, -1),
            "start": batch.starts[of] + within,
            "count": count,
            "cached": np.append(batch.cached, 0)[of] + within,
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
            query, pool, out, fields["row"], fields["start"], fields["count"], fields["cached"], fields["tables"],
            factor, query.stride(0), out.stride(0), self._shape.pages, pool.shape[3], heads // pool.shape[3],
            page=self._page_size, width=width, block=self._block, keys=KEYS, num_warps=4, num_stages=2,
        )  # fmt: skip
        return out
