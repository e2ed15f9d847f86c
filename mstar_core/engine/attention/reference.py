"""PyTorch reference of static attention: for float32 graphs, for captured steps on the CPU, and for kernel tests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.engine.attention.static import PagedKernels

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.staging import Fields, Values
    from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape

ALIGNED: Final = 16
"""Keys are padded to a multiple of this, as the kernels behind PyTorch's attention require of a mask."""

SHARES: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""The reference reads every page of its bucket, so there is a bucket for each of these parts of a sequence's pages."""


def page_buckets(most_pages: int) -> list[int]:
    """Return the page counts that the reference has a bucket for, ascending; the last is `most_pages`."""
    return sorted({math.ceil(most_pages * share) for share in SHARES})


def torch_static(pools: list[Tensor], page_size: int, shape: AttentionShape) -> TorchStaticAttention:
    """Make the reference of a shape."""
    kind = TorchFreshAttention if shape.is_fresh else TorchStaticAttention
    return kind(pools, page_size, shape)


class TorchStaticAttention(PagedKernels):
    """Gathers every page of the bucket and masks what a token may not see.

    Ragged sequences are padded to the bucket's tokens. If nothing is appended, the pages are gathered once per step and
    a pass's own tokens lie behind them.
    """

    def __init__(self, pools: list[Tensor], page_size: int, shape: AttentionShape) -> None:
        super().__init__(pools, page_size, shape)
        self._spare = pools[0].shape[0] - 1 if pools else 0
        self._inside = shape.pages * page_size
        behind = -(-(self._inside + shape.tokens) // ALIGNED) * ALIGNED
        self._width = self._inside if shape.writes else behind
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._mask: Tensor | None = None

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
            "halves": (torch.int64, shape.sequences * shape.pages),
        }

    def reset(self) -> None:
        """See StaticAttention."""
        self._kept, self._mask = {}, None

    def values(self, metadata: AttentionMetadata) -> Values:
        """See StaticAttention."""
        shape, count = self._shape, len(metadata.page_rows)
        halves = np.full((shape.sequences, shape.pages), 2 * self._spare, dtype=np.int64)
        halves[:count] = metadata.tables[metadata.page_rows, : shape.pages].astype(np.int64) * 2
        first = np.zeros(shape.sequences, dtype=np.int64)
        first[:count] = metadata.lengths
        # Padding sees one place: a softmax over no place is not a number.
        end = np.full(shape.sequences, int(shape.writes), dtype=np.int64)
        end[:count] = metadata.lengths_after if shape.writes else metadata.lengths
        elsewhere = 2 * self._spare * self._page_size
        found = {"first": first, "end": end, "halves": halves}
        if shape.is_ragged:
            found |= self._slots(metadata)
        if shape.writes:
            found["places"] = metadata.places(self._page_size, shape.packed_tokens, elsewhere)
        return found

    def _slots(self, metadata: AttentionMetadata) -> dict[str, np.ndarray]:
        """Return the padded slot of each packed token and the packed token of each padded slot."""
        shape, starts = self._shape, metadata.query_starts
        slot = np.zeros(shape.tokens, dtype=np.int64)
        source = np.zeros((shape.sequences, shape.tokens), dtype=np.int64)
        for index, (start, count) in enumerate(zip(starts, metadata.counts, strict=False)):
            source[index, :count] = np.arange(start, start + count)
            slot[start : start + count] = index * shape.tokens + np.arange(count)
        return {"slot": slot, "source": source}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        shape, kv_heads = self._shape, key.shape[1]
        heads, width = query.shape[1:]
        groups = heads // kv_heads
        keys, values = self._appended(layer, key, value) if shape.writes else self._beside(layer, key, value)
        padded = query.index_select(0, self._device["source"]) if shape.is_ragged else query
        own = padded.view(shape.sequences, shape.tokens, kv_heads, groups, width).permute(0, 2, 3, 1, 4)
        folded = own.reshape(shape.sequences, kv_heads, -1, width).to(keys.dtype)
        mixed = scaled_dot_product_attention(
            folded,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=self._visible(keys.dtype, groups),
            scale=scale,
        )
        spread = mixed.view(shape.sequences, kv_heads, groups, shape.tokens, width).permute(0, 3, 1, 2, 4)
        flat = spread.reshape(-1, heads, width)
        return (flat.index_select(0, self._device["slot"]) if shape.is_ragged else flat).to(query.dtype)

    def _append(self, layer: int, key: Tensor, value: Tensor) -> None:
        pool, places = self._pools[layer], self._device["places"]
        flat = pool.view(-1, pool.shape[3], pool.shape[4])
        flat.index_copy_(0, places, key.to(pool.dtype))
        flat.index_copy_(0, places + self._page_size, value.to(pool.dtype))

    def _appended(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append, and return keys and values of all pages: [rows, places, kv_heads, head_dim] each."""
        self._append(layer, key, value)
        pool = self._pools[layer]
        return self._gathered(pool, 0), self._gathered(pool, 1)

    def _beside(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same with the pass's own tokens behind the pages, which are not changed."""
        shape, pool = self._shape, self._pools[layer]
        if layer not in self._kept:
            room = (shape.sequences, self._width, pool.shape[3], pool.shape[4])
            both = torch.zeros(room, dtype=pool.dtype, device=pool.device), pool.new_zeros(room)
            for half, whole in enumerate(both):
                whole[:, : self._inside] = self._gathered(pool, half)
            self._kept[layer] = both
        behind = slice(self._inside, self._inside + shape.tokens)
        for whole, own in zip(self._kept[layer], (key, value), strict=True):
            whole[:, behind] = own.view(shape.sequences, shape.tokens, *own.shape[1:])
        return self._kept[layer]

    def _gathered(self, pool: Tensor, half: int) -> Tensor:
        shape = self._shape
        halves = pool.view(-1, self._page_size, pool.shape[3], pool.shape[4])
        taken = halves.index_select(0, self._device["halves"] + half).view(
            shape.sequences, self._inside, *pool.shape[3:]
        )
        # Unused places may hold NaN, and zero times NaN is NaN.
        unused = torch.arange(self._inside, device=pool.device) >= self._device["end"][:, None]
        return taken.masked_fill_(unused[..., None, None], 0)

    def _visible(self, dtype: torch.dtype, groups: int) -> Tensor:
        """Return the mask added to scores: 0 or minus infinity, [rows, 1, 1 or folded query tokens, places]."""
        if self._mask is None:
            shape, first, end = self._shape, self._device["first"], self._device["end"]
            place = torch.arange(self._width, device=end.device)
            if shape.causal and shape.tokens > 1:
                last = first[:, None] + torch.arange(shape.tokens, device=end.device)
                seen = (place <= last[..., None]).repeat(1, groups, 1)[:, None]
            else:
                inside = place < end[:, None]
                if not shape.writes:
                    inside = inside | ((place >= self._inside) & (place < self._inside + shape.tokens))
                seen = inside[:, None, None]
            none = torch.full(seen.shape, float("-inf"), dtype=dtype, device=end.device)
            self._mask = none.masked_fill_(seen, 0.0)
        return self._mask


class TorchFreshAttention(TorchStaticAttention):
    """Whole passes on empty caches: compares every packed token with every other and masks those of other passes."""

    @property
    def fields(self) -> Fields:
        """See StaticAttention. of: the pass of each token; padding is a pass of its own."""
        return {"places": (torch.int64, self._shape.tokens), "of": (torch.int32, self._shape.tokens)}

    def values(self, metadata: AttentionMetadata) -> Values:
        """See StaticAttention."""
        shape, count = self._shape, len(metadata.page_rows)
        sizes = np.append(metadata.counts, shape.tokens - metadata.tokens)
        of = np.repeat(np.arange(count + 1, dtype=np.int32), sizes)
        elsewhere = 2 * self._spare * self._page_size
        return {"places": metadata.places(self._page_size, shape.tokens, elsewhere), "of": of}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        self.keep(layer, key, value)
        pool, of = self._pools[layer], self._device["of"]
        groups = query.shape[1] // key.shape[1]
        own = key.to(pool.dtype), value.to(pool.dtype)
        keys, values = (each.transpose(0, 1).repeat_interleave(groups, dim=0)[None] for each in own)
        mask = (of[:, None] == of[None, :])[None, None]
        folded = query.to(pool.dtype).transpose(0, 1)[None]
        mixed = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        return mixed[0].transpose(0, 1).to(query.dtype)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See KeepingView."""
        self._append(layer, key, value)
