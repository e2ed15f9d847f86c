"""Attention of passes of several tokens a row in fixed shapes, without a mask among them: flow steps, whole frames.

`FixedPasses` is what the pass graphs talk to; this module holds the plain torch form and what all forms share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.engine.attention.block import Block
from mstar_core.engine.attention.static import places_of

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.block import Fields, Values
    from mstar_core.layers.kv_view import KVView

LOG2E: Final = 1.4426950408889634
"""What a scale is multiplied with where a kernel takes powers of two for powers of e."""

ALIGNED: Final = 16
"""Keys are padded to a multiple of this many, as the kernels behind torch want a mask to be."""

SHARES: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""The torch form reads every page of its bucket, so there is a bucket for each of these parts of a row's pages."""


NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """One bucket. tokens: of each row. pages: most pages of a row. writes: whether the tokens are appended."""

    rows: int
    tokens: int
    pages: int
    writes: bool


class FixedPasses(Protocol):
    """Attention of one bucket of passes. Made once per captured graph.

    Rows may be one sequence at several lengths, frames one behind the other: in each layer all rows append before any
    attends, and no kernel may read pages of the cache before that, not even those that a row held already. As soon as
    it starts it may where nothing is appended, and with a bucket of one row: where a replay holds several passes,
    modules have a kernel between two of them that starts when all before it has ended, as the first of a graph does.

    What else a replay reads of the host travels with what this reads: `beside` names it when this is made.
    """

    @property
    def device(self) -> Mapping[str, Tensor]:
        """All fields on the device, those of `beside` included; always the same memory."""

    @property
    def view(self) -> KVView:
        """What the module attends with inside the graph; always the same buffers."""

    def forget(self) -> None:
        """Called around a step, within the capture: what is kept from layer to layer of a step is of no other's use."""

    def prepare(self, rows: np.ndarray, cached: np.ndarray, tables: np.ndarray, beside: Values = NOTHING) -> None:
        """Fill the buffers for the next replay. rows, cached: int64 [n], n up to the bucket; tables as PackedRows.

        beside: values of the other fields. Any number of replays may wait on the device meanwhile.
        """


def page_buckets(most_pages: int) -> list[int]:
    """Pages of a row for which the torch form has a bucket each, ascending; the last is `most_pages`."""
    return sorted({math.ceil(most_pages * share) for share in SHARES})


class TorchFixedPasses:
    """The torch form: gathers every page of its bucket into one piece and runs torch's attention over it.

    Where nothing is appended the pages are gathered once per step, however often a layer attends, and the own tokens
    lie behind them.
    """

    def __init__(self, pools: list[Tensor], page_size: int, shape: PassShape, beside: Fields = NOTHING) -> None:
        self._pools = pools
        self._page_size = page_size
        self._shape = shape
        self._spare = pools[0].shape[0] - 1
        self._inside = shape.pages * page_size
        self._width = self._inside if shape.writes else -(-(self._inside + shape.tokens) // ALIGNED) * ALIGNED
        fields = {
            "places": (torch.int64, shape.rows * shape.tokens if shape.writes else 0),
            "end": (torch.int64, shape.rows),
            "halves": (torch.int64, shape.rows * shape.pages),
        }
        self._block = Block({**fields, **beside}, pools[0].device)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._mask: Tensor | None = None

    @property
    def device(self) -> Mapping[str, Tensor]:
        """See FixedPasses."""
        return self._block.device

    @property
    def view(self) -> TorchFixedPasses:
        """See FixedPasses: this object."""
        return self

    def forget(self) -> None:
        """See FixedPasses."""
        self._kept, self._mask = {}, None

    def prepare(self, rows: np.ndarray, cached: np.ndarray, tables: np.ndarray, beside: Values = NOTHING) -> None:
        """See FixedPasses."""
        shape, count = self._shape, len(rows)
        halves = np.full((shape.rows, shape.pages), 2 * self._spare, dtype=np.int64)
        halves[:count] = tables[rows, : shape.pages].astype(np.int64) * 2
        # A row that is nobody's sees one place, for a softmax over none is no number.
        end = np.full(shape.rows, int(shape.writes), dtype=np.int64)
        end[:count] = cached + (shape.tokens if shape.writes else 0)
        places = written(rows, cached, tables, self._page_size, shape, 2 * self._spare * self._page_size)
        self._block.send({**beside, "places": places, "end": end, "halves": halves.reshape(-1)})

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        shape, kv_heads = self._shape, key.shape[1]
        rows, heads, width = shape.rows, query.shape[1], query.shape[2]
        keys, values = self._appended(layer, key, value) if shape.writes else self._beside(layer, key, value)
        own = query.view(rows, shape.tokens, kv_heads, heads // kv_heads, width).permute(0, 2, 3, 1, 4)
        folded = own.reshape(rows, kv_heads, -1, width).to(keys.dtype)
        mask = self._visible(keys.dtype)
        mixed = scaled_dot_product_attention(
            folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scale
        )
        spread = mixed.view(rows, kv_heads, heads // kv_heads, shape.tokens, width).permute(0, 3, 1, 2, 4)
        return spread.reshape(-1, heads, width).to(query.dtype)

    def _appended(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all pages after this pass has added its own: [rows, places, kv_heads, head_dim] each."""
        pool, places = self._pools[layer], self._block.device["places"]
        flat = pool.view(-1, pool.shape[3], pool.shape[4])
        flat.index_copy_(0, places, key.to(pool.dtype))
        flat.index_copy_(0, places + self._page_size, value.to(pool.dtype))
        return self._gathered(pool, 0), self._gathered(pool, 1)

    def _beside(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The same with the own tokens behind the pages, which stay as they are."""
        shape, pool = self._shape, self._pools[layer]
        if layer not in self._kept:
            room = (shape.rows, self._width, pool.shape[3], pool.shape[4])
            both = torch.zeros(room, dtype=pool.dtype, device=pool.device), pool.new_zeros(room)
            for half, whole in enumerate(both):
                whole[:, : self._inside] = self._gathered(pool, half)
            self._kept[layer] = both
        behind = slice(self._inside, self._inside + shape.tokens)
        for whole, own in zip(self._kept[layer], (key, value), strict=True):
            whole[:, behind] = own.view(shape.rows, shape.tokens, *own.shape[1:])
        return self._kept[layer]

    def _gathered(self, pool: Tensor, half: int) -> Tensor:
        fields, shape = self._block.device, self._shape
        halves = pool.view(-1, self._page_size, pool.shape[3], pool.shape[4])
        taken = halves.index_select(0, fields["halves"] + half).view(shape.rows, self._inside, *pool.shape[3:])
        # Unused places may hold anything, and zero times NaN is NaN.
        unused = torch.arange(self._inside, device=pool.device) >= fields["end"][:, None]
        return taken.masked_fill_(unused[..., None, None], 0)

    def _visible(self, dtype: torch.dtype) -> Tensor:
        """What is added to scores: 0 where a place is seen, else minus infinity: [rows, 1, 1, places]."""
        if self._mask is None:
            end = self._block.device["end"]
            place = torch.arange(self._width, device=end.device)
            seen = place < end[:, None]
            if not self._shape.writes:
                seen = seen | ((place >= self._inside) & (place < self._inside + self._shape.tokens))
            none = torch.full(seen.shape, float("-inf"), dtype=dtype, device=end.device)
            self._mask = none.masked_fill_(seen, 0.0)[:, None, None]
        return self._mask


def written(
    rows: np.ndarray, cached: np.ndarray, tables: np.ndarray, page_size: int, shape: PassShape, elsewhere: int
) -> np.ndarray:
    """Where a flat pool keeps the key of each packed token: int64 [rows * tokens], `elsewhere` for spare rows.

    Empty where nothing is appended.
    """
    if not shape.writes:
        return np.zeros(0, dtype=np.int64)
    places = np.full((shape.rows, shape.tokens), elsewhere, dtype=np.int64)
    inside = np.arange(shape.tokens)
    if len(rows) and int((cached % page_size).max()) + shape.tokens <= page_size:
        # All of a pass on one page, as frames are: one place to look up for each, and not one for each token.
        places[: len(rows)] = places_of(rows, cached, tables, page_size)[:, None] + inside
    elif len(rows):
        at = cached[:, None] + inside
        places[: len(rows)] = places_of(np.broadcast_to(rows[:, None], at.shape), at, tables, page_size)
    return places.reshape(-1)
