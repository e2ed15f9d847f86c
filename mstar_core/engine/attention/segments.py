"""Attention of packed prompts in fixed shapes: the host fills buffers, a captured step reads them.

`FixedSegments` is what the prefill graphs talk to; this module holds the plain torch form and what all forms share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.engine.attention.static import Staging

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import KVView


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPrompts:
    """Causal pieces that write, one after the other from the first packed token on.

    rows, counts, cached: int64 [n], the page table of each piece, its tokens, and the tokens of its row in the cache
    before it. tables: int32 [slots, max_pages].
    """

    rows: np.ndarray
    counts: np.ndarray
    cached: np.ndarray
    tables: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """First packed token of each piece, then their sum: int64 [n + 1]."""
        starts = np.zeros(len(self.counts) + 1, dtype=np.int64)
        np.cumsum(self.counts, out=starts[1:])
        return starts

    def places(self, page_size: int, size: int, elsewhere: int) -> np.ndarray:
        """Where a flat pool keeps the key of each packed token: int64 [size], `elsewhere` for those past the last."""
        places = np.full(size, elsewhere, dtype=np.int64)
        inside, start = np.arange(page_size), 0
        # Page by page: to divide the number of each token takes several times as long.
        for row, count, cached in zip(self.rows.tolist(), self.counts.tolist(), self.cached.tolist(), strict=True):
            end, skipped = start + count, cached % page_size
            pages = self.tables[row, cached // page_size : -(-(cached + count) // page_size)].astype(np.int64)
            whole = (pages[:, None] * (2 * page_size) + inside).reshape(-1)
            places[start:end] = whole[skipped : skipped + count]
            start = end
        return places


class FixedSegments(Protocol):
    """Prompt attention for one bucket. Made once per captured graph."""

    @property
    def view(self) -> KVView:
        """What the module attends with inside the graph; always the same buffers."""

    def prepare(self, prompts: PackedPrompts) -> None:
        """Fill the buffers for the next replay. The prompts fit the bucket; none at all is allowed."""


class TorchFixedSegments:
    """The torch form: every piece is padded to the bucket's tokens and sees every page that a row could have.

    Exact, slow and hungry ([rows, tokens, max_pages * page] scores): for float32 and for tests.
    """

    def __init__(self, pools: list[Tensor], page_size: int, tokens: int, rows: int, max_pages: int) -> None:
        self._pools = pools
        self._page_size = page_size
        self._tokens = tokens
        self._rows = rows
        self._max_pages = max_pages
        self._spare = pools[0].shape[0] - 1 if pools else 0
        fields = {
            "places": (torch.int64, tokens),
            "row": (torch.int64, tokens),
            "at": (torch.int64, tokens),
            "source": (torch.int64, rows * tokens),
            "first": (torch.int64, rows),
            "end": (torch.int64, rows),
            "halves": (torch.int64, rows * max_pages),
        }
        self._staging = Staging(fields, pools[0].device if pools else torch.device("cpu"))

    @property
    def view(self) -> TorchFixedSegments:
        """See FixedSegments: this object."""
        return self

    def prepare(self, prompts: PackedPrompts) -> None:
        """See FixedSegments."""
        host, count, starts = self._staging.next(), len(prompts.rows), prompts.starts
        host["places"][:] = prompts.places(self._page_size, self._tokens, self._spare * 2 * self._page_size)
        # row, at: the piece of each token and its number within; source: the token at each number of each piece.
        host["row"][:] = host["at"][:] = host["source"][:] = 0
        host["row"][: starts[-1]] = np.repeat(np.arange(count), prompts.counts)
        host["at"][: starts[-1]] = np.arange(starts[-1]) - np.repeat(starts[:-1], prompts.counts)
        source = host["source"].reshape(self._rows, self._tokens)
        for index, (start, tokens) in enumerate(zip(starts, prompts.counts, strict=False)):
            source[index, :tokens] = np.arange(start, start + tokens)
        host["first"][:] = host["end"][:] = 0
        host["first"][:count], host["end"][:count] = prompts.cached, prompts.cached + prompts.counts
        halves = host["halves"].reshape(self._rows, self._max_pages)
        halves[:count] = prompts.tables[prompts.rows].astype(np.int64) * 2
        halves[count:] = self._spare * 2
        self._staging.send("halves")

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        pool, page = self._pools[layer], self._page_size
        heads, width = query.shape[1:]
        kv_heads = pool.shape[3]
        fields = self._staging.device
        flat = pool.view(-1, kv_heads, width)
        flat.index_copy_(0, fields["places"], key.to(pool.dtype))
        flat.index_copy_(0, fields["places"] + page, value.to(pool.dtype))
        halves = pool.view(-1, page, kv_heads, width)
        shape = (self._rows, -1, kv_heads, width)
        keys = halves.index_select(0, fields["halves"]).view(shape).transpose(1, 2)
        values = halves.index_select(0, fields["halves"] + 1).view(shape).transpose(1, 2)
        last = fields["first"][:, None] + torch.arange(self._tokens, device=pool.device)
        place = torch.arange(keys.shape[2], device=pool.device)
        visible = place <= last[..., None]
        # Unused places may hold anything, and zero times NaN is NaN.
        values = values.masked_fill((place >= fields["end"][:, None])[:, None, :, None], 0)
        groups = heads // kv_heads
        padded = query.index_select(0, fields["source"]).view(self._rows, self._tokens, kv_heads, groups, width)
        folded = padded.permute(0, 2, 3, 1, 4).reshape(self._rows, kv_heads, groups * self._tokens, width)
        mask = visible.repeat(1, groups, 1)[:, None]
        out = scaled_dot_product_attention(folded.to(pool.dtype), keys, values, attn_mask=mask, scale=scale)
        spread = out.view(self._rows, kv_heads, groups, self._tokens, width).permute(0, 3, 1, 2, 4)
        own = spread.reshape(self._rows * self._tokens, heads, width)
        return own.index_select(0, fields["row"] * self._tokens + fields["at"]).to(query.dtype)
