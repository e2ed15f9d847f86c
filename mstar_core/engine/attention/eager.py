"""Attention over pages in PyTorch: the CPU path and the reference of other backends.

Query heads that share a KV head are folded into the query length, so keys and values are never repeated. Masked
places have weight exactly zero, and the softmax is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.engine.attention.reference import page_buckets, torch_static
from mstar_core.engine.transfers import upload

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.reference import TorchStaticAttention
    from mstar_core.engine.cache.page_table import PageCopy
    from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape

PADDING_LIMIT: Final = 2.0
"""A decode batch is split by length if padding to the longest would more than double the keys to read."""


class EagerAttention:
    """Attention by index operations over the pools. Owned by one KV engine."""

    name = "torch"

    def __init__(self, pools: list[Tensor], page_size: int) -> None:
        self._pools = pools
        self._page_size = page_size

    def plan(self, metadata: AttentionMetadata) -> EagerView:
        """See AttentionBackend. The indices are made when the first layer attends."""
        return EagerView(self._pools, self._page_size, metadata)

    def static(self, shape: AttentionShape) -> TorchStaticAttention:
        """See AttentionBackend."""
        return torch_static(self._pools, self._page_size, shape)

    def pass_pages(self, most_pages: int) -> list[int]:
        """See AttentionBackend. Every page of a bucket is read, so there are several buckets."""
        return page_buckets(most_pages)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """See AttentionBackend. Masked places are read here, and NaN times zero is NaN."""
        if not pages or not self._pools:
            return
        target = upload(np.array(pages, dtype=np.int64), self._pools[0].device)
        for pool in self._pools:
            pool.index_fill_(0, target, 0.0)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages of every layer."""
        if not copies or not self._pools:
            return
        source, target = upload(np.array(copies, dtype=np.int64).T.copy(), self._pools[0].device)
        for pool in self._pools:
            pool.index_copy_(0, target, pool.index_select(0, source))


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Decode sequences of similar length, padded to the longest.

    rows: int64 [n], None = all. keys, values: int64 [n * width], half pages of a pool, key halves before value halves.
    mask: bool [n, 1, 1, width * page].
    """

    rows: Tensor | None
    count: int
    keys: Tensor
    values: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _SegmentPlan:
    """A pass of several tokens, with its earlier half pages (int64 [m] each) and its mask.

    tokens: its packed tokens. length: tokens in the cache before. mask: [groups * tokens, length + tokens] or None.
    """

    tokens: slice
    length: int
    keys: Tensor
    values: Tensor
    mask: Tensor | None


class EagerView:
    """The KVView of one forward."""

    def __init__(self, pools: list[Tensor], page_size: int, metadata: AttentionMetadata) -> None:
        self._pools = pools
        self._page_size = page_size
        self._metadata = metadata

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        pool = self._pools[layer]
        self._write(pool, key, value)
        parts = []
        if self._decode_count:
            parts.append(self._decode(pool, query[: self._decode_count], scale))
        for plan in self._segments(query.shape[1] // key.shape[1]):
            tokens = plan.tokens
            parts.append(self._attend_segment(pool, plan, query[tokens], key[tokens], value[tokens], scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @cached_property
    def _decode_count(self) -> int:
        return self._metadata.leading_decodes

    def _write(self, pool: Tensor, key: Tensor, value: Tensor) -> None:
        if self._targets is None:
            return
        tokens, keys, values = self._targets
        if tokens is not None:
            key, value = key[tokens], value[tokens]
        flat = pool.view(-1, pool.shape[3], pool.shape[4])
        flat.index_copy_(0, keys, key.to(pool.dtype))
        flat.index_copy_(0, values, value.to(pool.dtype))

    def _decode(self, pool: Tensor, query: Tensor, scale: float | None) -> Tensor:
        if len(self._buckets) == 1:
            return self._attend_bucket(pool, self._buckets[0], query, scale)
        out = torch.empty_like(query)
        for bucket in self._buckets:
            assert bucket.rows is not None
            out[bucket.rows] = self._attend_bucket(pool, bucket, query[bucket.rows], scale)
        return out

    def _attend_bucket(self, pool: Tensor, bucket: _Bucket, query: Tensor, scale: float | None) -> Tensor:
        heads, width = query.shape[1:]
        kv_heads = pool.shape[3]
        halves = pool.view(-1, self._page_size, kv_heads, width)
        shape = (bucket.count, -1, kv_heads, width)
        keys = halves.index_select(0, bucket.keys).view(shape).transpose(1, 2)
        values = halves.index_select(0, bucket.values).view(shape).transpose(1, 2)
        folded = query.view(bucket.count, kv_heads, heads // kv_heads, width).to(pool.dtype)
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=bucket.mask, scale=scale)
        return out.reshape(bucket.count, heads, width).to(query.dtype)

    def _attend_segment(
        self, pool: Tensor, plan: _SegmentPlan, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        count, heads, width = query.shape
        kv_heads = key.shape[1]
        key, value = key.to(pool.dtype), value.to(pool.dtype)
        cached = plan.length
        if cached:
            halves = pool.view(-1, self._page_size, kv_heads, width)
            key = torch.cat([halves.index_select(0, plan.keys).view(-1, kv_heads, width)[:cached], key])
            value = torch.cat([halves.index_select(0, plan.values).view(-1, kv_heads, width)[:cached], value])
        folded = query.view(count, kv_heads, -1, width).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, width)
        out = scaled_dot_product_attention(
            folded.to(pool.dtype),
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=plan.mask,
            scale=scale,
        )
        unfolded = out.view(kv_heads, heads // kv_heads, count, width).permute(2, 0, 1, 3)
        return unfolded.reshape(count, heads, width).to(query.dtype)

    @cached_property
    def _targets(self) -> tuple[Tensor | None, Tensor, Tensor] | None:
        """Packed tokens to write (None = all) and their places among the keys and among the values of a flat pool."""
        metadata, page = self._metadata, self._page_size
        if not metadata.writes.any():
            return None
        places, tokens = metadata.places(page, metadata.tokens, -1), None
        if not metadata.writes.all():
            written = metadata.tokens_of(metadata.writes)
            places, tokens = places[written], self._on_device(written)
        return tokens, self._on_device(places), self._on_device(places + page)

    @cached_property
    def _buckets(self) -> list[_Bucket]:
        page_rows = self._metadata.page_rows[: self._decode_count]
        lengths = self._metadata.lengths[: self._decode_count]
        pages = lengths // self._page_size + 1
        longest = int(pages.max())
        if len(pages) == 1 or longest * len(pages) <= PADDING_LIMIT * int(pages.sum()):
            return [self._bucket(None, page_rows, lengths, longest)]
        buckets = []
        size_class = np.ceil(np.log2(pages)).astype(np.int64)
        for chosen in np.unique(size_class):
            rows = np.nonzero(size_class == chosen)[0]
            buckets.append(self._bucket(rows, page_rows[rows], lengths[rows], int(pages[rows].max())))
        return buckets

    def _bucket(self, rows: np.ndarray | None, tables: np.ndarray, cached: np.ndarray, width: int) -> _Bucket:
        size = width * self._page_size
        mask = None
        if int(cached.min()) + 1 < size:
            mask = self._on_device(np.arange(size)[None] <= cached[:, None])[:, None, None]
        # Table entries past the last page are readable pages, and masked.
        keys = self._on_device(self._metadata.tables[tables, :width].astype(np.int64).reshape(-1) * 2)
        return _Bucket(None if rows is None else self._on_device(rows), len(tables), keys, keys + 1, mask)

    def _segments(self, groups: int) -> list[_SegmentPlan]:
        if not self._segment_plans:
            others = range(self._decode_count, len(self._metadata.page_rows))
            self._segment_plans.extend(self._segment_plan(index, groups) for index in others)
        return self._segment_plans

    @cached_property
    def _segment_plans(self) -> list[_SegmentPlan]:
        return []

    def _segment_plan(self, index: int, groups: int) -> _SegmentPlan:
        metadata = self._metadata
        start, end = metadata.query_starts[index : index + 2].tolist()
        length = int(metadata.lengths[index])
        held = -(-length // self._page_size)
        keys = self._on_device(metadata.tables[metadata.page_rows[index], :held].astype(np.int64) * 2)
        if not metadata.causal[index] or end - start == 1:
            return _SegmentPlan(slice(start, end), length, keys, keys + 1, None)
        places = torch.arange(length + end - start, device=keys.device)
        visible = places[None] <= places[length:, None]
        return _SegmentPlan(slice(start, end), length, keys, keys + 1, visible.repeat(groups, 1))

    def _on_device(self, array: np.ndarray) -> Tensor:
        return upload(array, self._pools[0].device)
