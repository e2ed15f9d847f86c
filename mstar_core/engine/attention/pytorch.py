"""Attention over pages in PyTorch: the CPU path, the path of float32 on GPUs, and the reference of all kernels.

Captured and uncaptured forwards append, gather pages, mask and attend by the same functions. Query heads that share a
KV head are folded into the query length, so keys and values are never repeated. Masked places have weight exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.engine.attention.static import StaticAttention
from mstar_core.engine.transfers import upload

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.staging import Fields, Values
    from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
    from mstar_core.engine.steps.updates import PageCopy

PADDING_LIMIT: Final = 2.0
"""A decode batch is split by length if padding to the longest would more than double the keys to read."""

SHARES: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""A captured forward reads every page of its bucket, so there is a bucket for each of these parts of the pages."""

ALIGNED: Final = 16
"""Keys beside the cache are padded to a multiple of this, as the kernels behind PyTorch's attention require of a mask.
"""

MANY_TOKENS: Final = 2048
"""Fewest tokens of a dense pass for which PyTorch chooses the kernel. On Hopper it takes cuDNN's, which is 1.6 times as
fast as flash attention, but needs 40 to 60 ms for each new number of tokens or keys."""


class TorchAttention:
    """Attention by index operations over the pools. Owned by one KV engine."""

    name = "torch"

    def __init__(self, pools: list[Tensor], page_size: int, windows: Sequence[int] = ()) -> None:
        """windows: see `KVSpec`."""
        self._pools = pools
        self._page_size = page_size
        self._windows = tuple(windows) or (0,) * len(pools)

    def plan(self, metadata: AttentionMetadata) -> TorchView:
        """See AttentionBackend. The indices are made when the first layer attends."""
        return TorchView(self._pools, self._page_size, metadata, self._windows)

    def dense(self, metadata: AttentionMetadata) -> TorchView:
        """Prepare a forward of unmasked passes that the caller appends, with PyTorch's kernels for contiguous keys.

        Copying the cached keys of a long pass costs little beside its attention.
        """
        return TorchView(self._pools, self._page_size, metadata, self._windows, is_dense=True)

    def static(self, shape: AttentionShape) -> TorchStatic:
        """See AttentionBackend."""
        return (TorchFresh if shape.is_fresh else TorchStatic)(self._pools, self._page_size, shape, self._windows)

    def pass_pages(self, most_pages: int) -> list[int]:
        """See AttentionBackend. Every page of a bucket is read, so there are several buckets."""
        return sorted({math.ceil(most_pages * share) for share in SHARES})

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


# -- operations of captured and uncaptured forwards ------------------------------------------------------------------


def append(pool: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
    """Append tokens to the cache. places: int64 [T], of their keys in the flat pool."""
    flat = pool.view(-1, pool.shape[3], pool.shape[4])
    flat.index_copy_(0, places, key.to(pool.dtype))
    flat.index_copy_(0, places + pool.shape[2], value.to(pool.dtype))


def half_pages(pages: np.ndarray) -> np.ndarray:
    """Return the indices of the key halves, then of the value halves, of these pages: int64 [2 * size]."""
    keys = pages.reshape(-1).astype(np.int64) * 2
    return np.concatenate([keys, keys + 1])


def gather_pages(pool: Tensor, halves: Tensor, sequences: int) -> Tensor:
    """Return keys, then values, of pages: [2, sequences, places, kv_heads, head_dim]. halves: see `half_pages`."""
    taken = pool.view(-1, *pool.shape[2:]).index_select(0, halves)
    return taken.view(2, sequences, -1, *pool.shape[3:])


def causal_places(first: Tensor, tokens: int, places: int, groups: int, window: int = 0) -> Tensor:
    """Return which places the folded query tokens see: bool [n, 1, groups * tokens, places].

    first: int64 [n], tokens in the cache before the first query token. window: see `KVSpec`.
    """
    last = (first[:, None] + torch.arange(tokens, device=first.device))[..., None]
    place = torch.arange(places, device=first.device)
    seen = place <= last
    if window:
        seen &= place > last - window
    return seen.repeat(1, groups, 1)[:, None]


def places_before(end: Tensor, places: int, window: int = 0) -> Tensor:
    """Return which places lie before `end` (int64 [n]), the last `window` of them: bool [n, 1, 1, places]."""
    place = torch.arange(places, device=end.device)
    seen = place < end[:, None]
    if window:
        seen &= place >= end[:, None] - window
    return seen[:, None, None]


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask that is added to scores, of the same shape: 0 or minus infinity."""
    return torch.full(seen.shape, float("-inf"), dtype=dtype, device=seen.device).masked_fill_(seen, 0.0)


def attend_folded(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attend with folded query heads. Returns [n * tokens, heads, head_dim] in the query's dtype.

    query: [n, tokens, heads, head_dim]. keys, values: [n, places, kv_heads, head_dim]. mask: broadcastable to
    [n, kv_heads, groups * tokens, places].
    """
    count, tokens, heads, width = query.shape
    kv_heads = keys.shape[2]
    parted = (count, kv_heads, heads // kv_heads, tokens, width)
    folded = query.view(count, tokens, *parted[1:3], width).permute(0, 2, 3, 1, 4).reshape(count, kv_heads, -1, width)
    out = scaled_dot_product_attention(
        folded.to(keys.dtype), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return out.view(parted).permute(0, 3, 1, 2, 4).reshape(-1, heads, width).to(query.dtype)


def attend_dense(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attend without a mask, by PyTorch's kernels for contiguous keys. Returns [T, heads, head_dim].

    query: [T, heads, head_dim]; key, value: [keys, kv_heads, head_dim], of the same dtype.
    """
    q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
    if query.is_cuda and query.shape[0] < MANY_TOKENS:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    else:
        out = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


# -- uncaptured forwards ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _DecodeBucket:
    """Decode sequences of similar length, padded to the longest.

    chosen: int64 [n], their indices in the decode batch, None for all. halves: see `half_pages`. mask: additive.
    """

    chosen: Tensor | None
    count: int
    halves: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass of one sequence. tokens: its packed tokens. length: tokens in the cache before, on `pages`.

    pages: halves (see `half_pages`); int32 page numbers for dense passes on CUDA. mask: additive.
    """

    tokens: slice
    length: int
    pages: Tensor
    mask: Tensor | None


class TorchView:
    """The KVView of one uncaptured forward."""

    def __init__(
        self,
        pools: list[Tensor],
        page_size: int,
        metadata: AttentionMetadata,
        windows: Sequence[int],
        *,
        is_dense: bool = False,
    ) -> None:
        """is_dense: see `TorchAttention.dense`."""
        self._pools = pools
        self._page_size = page_size
        self._metadata = metadata
        self._windows = windows
        self._is_dense = is_dense
        self._buckets: dict[int, list[_DecodeBucket]] = {}  # by window, as the passes
        self._passes: dict[int, list[_Pass]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        pool, window = self._pools[layer], self._windows[layer]
        if not self._is_dense:
            self._append(pool, key, value)
        parts = []
        if self._decode_count:
            parts.append(self._decode(pool, window, query[: self._decode_count], scale))
        for planned in self._planned(query.shape[1] // key.shape[1], window):
            tokens = planned.tokens
            parts.append(self._attend_pass(pool, planned, query[tokens], (key[tokens], value[tokens]), scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See KeepingView."""
        self._append(self._pools[layer], key, value)

    def attend_cross(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        """See MemoryView."""
        heads, width = query.shape[1:]
        parts = []
        for tokens, count, length, halves in self._memories:
            keys, values = gather_pages(self._pools[layer], halves, count)[:, :, :length]
            parts.append(attend_folded(query[tokens].view(count, -1, heads, width), keys, values, None, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @cached_property
    def _memories(self) -> list[tuple[slice, int, int, Tensor]]:
        """Neighbouring sequences with equal sizes: packed tokens, sequences, tokens of a memory, its `half_pages`."""
        metadata = self._metadata
        assert metadata.memory is not None, "the node declares no memory"
        (rows, lengths), counts, starts = metadata.memory, metadata.counts, metadata.query_starts
        borders = np.nonzero((np.diff(lengths) != 0) | (np.diff(counts) != 0))[0] + 1
        groups = []
        for first, last in zip([0, *borders.tolist()], [*borders.tolist(), len(rows)], strict=True):
            pages = metadata.tables[rows[first:last], : -(-int(lengths[first]) // self._page_size)]
            tokens = slice(int(starts[first]), int(starts[last]))
            groups.append((tokens, last - first, int(lengths[first]), self._on_device(half_pages(pages))))
        return groups

    def _append(self, pool: Tensor, key: Tensor, value: Tensor) -> None:
        if self._targets is None:
            return
        tokens, places = self._targets
        if tokens is not None:
            key, value = key[tokens], value[tokens]
        append(pool, places, key, value)

    def _decode(self, pool: Tensor, window: int, query: Tensor, scale: float | None) -> Tensor:
        if window not in self._buckets:
            self._buckets[window] = self._decode_buckets(window)
        buckets = self._buckets[window]
        if len(buckets) == 1:
            return self._attend_bucket(pool, buckets[0], query, scale)
        out = torch.empty_like(query)
        for bucket in buckets:
            assert bucket.chosen is not None
            out[bucket.chosen] = self._attend_bucket(pool, bucket, query[bucket.chosen], scale)
        return out

    def _attend_bucket(self, pool: Tensor, bucket: _DecodeBucket, query: Tensor, scale: float | None) -> Tensor:
        keys, values = gather_pages(pool, bucket.halves, bucket.count)
        return attend_folded(query[:, None], keys, values, bucket.mask, scale)

    def _attend_pass(
        self, pool: Tensor, planned: _Pass, query: Tensor, new: tuple[Tensor, Tensor], scale: float | None
    ) -> Tensor:
        key, value = new[0].to(pool.dtype), new[1].to(pool.dtype)
        if planned.length:
            key, value = self._with_cached(pool, planned, key, value)
        if self._is_dense:
            return attend_dense(query.to(pool.dtype), key, value, scale).to(query.dtype)
        return attend_folded(query[None], key[None], value[None], planned.mask, scale)

    def _with_cached(self, pool: Tensor, planned: _Pass, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a pass, the cached ones first."""
        if self._is_dense and pool.is_cuda:
            from mstar_core.engine.attention.kernels.page_copies import gather

            joined = gather(pool, self._page_size, planned.pages, planned.length, key, value)
            return joined[0], joined[1]
        keys, values = gather_pages(pool, planned.pages, 1)[:, 0, : planned.length]
        return torch.cat([keys, key]), torch.cat([values, value])

    @cached_property
    def _decode_count(self) -> int:
        return self._metadata.leading_decodes

    @cached_property
    def _targets(self) -> tuple[Tensor | None, Tensor] | None:
        """Packed tokens to append (None for all) and the places of their keys in a flat pool; None for no tokens."""
        metadata = self._metadata
        if not metadata.writes.any():
            return None
        places = metadata.places(self._page_size, metadata.tokens, -1)
        if metadata.writes.all():
            return None, self._on_device(places)
        written = metadata.tokens_of(metadata.writes)
        return self._on_device(written), self._on_device(places[written])

    def _decode_buckets(self, window: int) -> list[_DecodeBucket]:
        page_rows = self._metadata.page_rows[: self._decode_count]
        lengths = self._metadata.lengths[: self._decode_count]
        pages = lengths // self._page_size + 1
        longest = int(pages.max())
        if len(pages) == 1 or longest * len(pages) <= PADDING_LIMIT * int(pages.sum()):
            return [self._bucket(None, page_rows, lengths, longest, window)]
        buckets = []
        size_class = np.ceil(np.log2(pages)).astype(np.int64)
        for number in np.unique(size_class):
            chosen = np.nonzero(size_class == number)[0]
            widest = int(pages[chosen].max())
            buckets.append(self._bucket(chosen, page_rows[chosen], lengths[chosen], widest, window))
        return buckets

    def _bucket(
        self, chosen: np.ndarray | None, page_rows: np.ndarray, lengths: np.ndarray, width: int, window: int
    ) -> _DecodeBucket:
        places, mask = width * self._page_size, None
        if int(lengths.min()) + 1 < places or window:
            mask = additive(places_before(self._on_device(lengths + 1), places, window), self._pools[0].dtype)
        # Table entries past the last page are readable pages, and masked.
        halves = self._on_device(half_pages(self._metadata.tables[page_rows, :width]))
        return _DecodeBucket(None if chosen is None else self._on_device(chosen), len(lengths), halves, mask)

    def _planned(self, groups: int, window: int) -> list[_Pass]:
        """Return the passes behind the decode batch; made once for all layers of one window."""
        if window not in self._passes:
            numbers = range(self._decode_count, len(self._metadata.page_rows))
            self._passes[window] = [self._pass(number, groups, window) for number in numbers]
        return self._passes[window]

    def _pass(self, number: int, groups: int, window: int) -> _Pass:
        metadata = self._metadata
        start, end = metadata.query_starts[number : number + 2].tolist()
        length, tokens = int(metadata.lengths[number]), end - start
        pages = metadata.tables[metadata.page_rows[number], : -(-length // self._page_size)]
        on_device = self._on_device(pages if self._is_dense and self._pools[0].is_cuda else half_pages(pages))
        mask = None
        if metadata.causal[number] and (tokens > 1 or window):
            first = self._on_device(metadata.lengths[number : number + 1])
            mask = additive(causal_places(first, tokens, length + tokens, groups, window), self._pools[0].dtype)
        return _Pass(slice(start, end), length, on_device, mask)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return upload(array, self._pools[0].device)


# -- captured forwards -----------------------------------------------------------------------------------------------


class TorchStatic(StaticAttention):
    """Gathers every page of the bucket and masks what a token may not see.

    Ragged sequences are padded to the bucket's tokens. If nothing is appended, the pages are gathered once per step and
    a pass's own tokens lie behind them.
    """

    def __init__(self, pools: list[Tensor], page_size: int, shape: AttentionShape, windows: Sequence[int] = ()) -> None:
        super().__init__(pools, page_size, shape)
        self._windows = windows or (0,) * len(pools)
        self._spare = pools[0].shape[0] - 1 if pools else 0
        self._inside = shape.pages * page_size
        behind = -(-(self._inside + shape.tokens) // ALIGNED) * ALIGNED
        self._width = self._inside if shape.writes else behind
        self._kept: dict[int, Tensor] = {}
        self._masks: dict[int, Tensor] = {}  # by window

    @property
    def fields(self) -> Fields:
        """See StaticAttention.

        first, end: tokens of a sequence that its first and its last token see, the former without itself. For ragged
        sequences: the padded slot of each packed token, and the packed token of each padded slot.
        """
        shape = self._shape
        ragged = {"slot": (torch.int64, shape.tokens), "source": (torch.int64, shape.sequences * shape.tokens)}
        return {
            "places": (torch.int64, shape.packed_tokens if shape.writes else 0),
            **(ragged if shape.is_ragged else {}),
            "first": (torch.int64, shape.sequences),
            "end": (torch.int64, shape.sequences),
            "halves": (torch.int64, 2 * shape.sequences * shape.pages),
        }

    def reset(self) -> None:
        """See StaticAttention."""
        self._kept, self._masks = {}, {}

    def values(self, metadata: AttentionMetadata) -> Values:
        """See StaticAttention."""
        shape, count = self._shape, len(metadata.page_rows)
        pages = np.full((shape.sequences, shape.pages), self._spare, dtype=np.int64)
        pages[:count] = metadata.tables[metadata.page_rows, : shape.pages]
        first = np.zeros(shape.sequences, dtype=np.int64)
        first[:count] = metadata.lengths
        # Padding sees one place: a softmax over no place is not a number.
        end = np.full(shape.sequences, int(shape.writes), dtype=np.int64)
        end[:count] = metadata.lengths_after if shape.writes else metadata.lengths
        values = {"first": first, "end": end, "halves": half_pages(pages)}
        if shape.is_ragged:
            values |= self._slots(metadata)
        if shape.writes:
            values["places"] = self._places(metadata, shape.packed_tokens)
        return values

    def _places(self, metadata: AttentionMetadata, size: int) -> np.ndarray:
        return metadata.places(self._page_size, size, 2 * self._spare * self._page_size)

    def _slots(self, metadata: AttentionMetadata) -> dict[str, np.ndarray]:
        """Return the padded slot of each packed token and the packed token of each padded slot."""
        used = np.zeros((self._shape.sequences, self._shape.tokens), dtype=np.bool_)
        used[: len(metadata.page_rows)] = np.arange(self._shape.tokens) < metadata.counts[:, None]
        source = np.zeros(used.shape, dtype=np.int64)
        source[used] = np.arange(metadata.tokens)
        return {"slot": np.flatnonzero(used), "source": source}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        shape, heads, width = self._shape, *query.shape[1:]
        keys, values = self._appended(layer, key, value) if shape.writes else self._beside(layer, key, value)
        padded = query.index_select(0, self._device["source"]) if shape.is_ragged else query
        mask = self._visible(keys.dtype, heads // key.shape[1], self._windows[layer])
        out = attend_folded(padded.view(shape.sequences, shape.tokens, heads, width), keys, values, mask, scale)
        return out.index_select(0, self._device["slot"]) if shape.is_ragged else out

    def read(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        """See StaticAttention."""
        keys, values = self._gathered(layer)
        mask = additive(places_before(self._device["end"], self._inside), keys.dtype)
        return attend_folded(query[:, None], keys, values, mask, scale)

    def _appended(self, layer: int, key: Tensor, value: Tensor) -> Tensor:
        """Append, and return keys and values of all pages: [2, sequences, places, kv_heads, head_dim]."""
        append(self._pools[layer], self._device["places"], key, value)
        return self._gathered(layer)

    def _beside(self, layer: int, key: Tensor, value: Tensor) -> Tensor:
        """Return the same with the pass's own tokens behind the pages, which are not changed."""
        shape, pool = self._shape, self._pools[layer]
        if layer not in self._kept:
            joined = pool.new_zeros((2, shape.sequences, self._width, *pool.shape[3:]))
            joined[:, :, : self._inside] = self._gathered(layer)
            self._kept[layer] = joined
        behind = slice(self._inside, self._inside + shape.tokens)
        for whole, new in zip(self._kept[layer], (key, value), strict=True):
            whole[:, behind] = new.view(shape.sequences, shape.tokens, *new.shape[1:])
        return self._kept[layer]

    def _gathered(self, layer: int) -> Tensor:
        taken = gather_pages(self._pools[layer], self._device["halves"], self._shape.sequences)
        # Unused places may hold NaN, and zero times NaN is NaN.
        used = places_before(self._device["end"], self._inside).view(self._shape.sequences, -1, 1, 1)
        return taken.masked_fill_(~used, 0)

    def _visible(self, dtype: torch.dtype, groups: int, window: int) -> Tensor:
        """Return the additive mask of the step: [sequences, 1, 1 or folded query tokens, places]."""
        if window not in self._masks:
            shape = self._shape
            if shape.causal and shape.tokens > 1:
                seen = causal_places(self._device["first"], shape.tokens, self._width, groups, window)
            else:
                seen = places_before(self._device["end"], self._width, window if shape.causal else 0)
            if not shape.writes:
                seen[..., self._inside : self._inside + shape.tokens] = True
            self._masks[window] = additive(seen, dtype)
        return self._masks[window]


class TorchFresh(TorchStatic):
    """Whole passes on empty caches: compares every packed token with every other and masks those of other passes."""

    @property
    def fields(self) -> Fields:
        """See StaticAttention. of: the pass of each token; padding is a pass of its own."""
        return {"places": (torch.int64, self._shape.tokens), "of": (torch.int32, self._shape.tokens)}

    def values(self, metadata: AttentionMetadata) -> Values:
        """See StaticAttention."""
        count, tokens = len(metadata.page_rows), self._shape.tokens
        sizes = np.append(metadata.counts, tokens - metadata.tokens)
        of = np.repeat(np.arange(count + 1, dtype=np.int32), sizes)
        return {"places": self._places(metadata, tokens), "of": of}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        self.keep(layer, key, value)
        dtype, of = self._pools[layer].dtype, self._device["of"]
        mask = (of[:, None] == of).repeat(query.shape[1] // key.shape[1], 1)
        return attend_folded(query[None], key.to(dtype)[None], value.to(dtype)[None], mask, scale)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See KeepingView."""
        append(self._pools[layer], self._device["places"], key, value)
