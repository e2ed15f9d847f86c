"""Attention of whole passes of any lengths packed into one, in fixed shapes: prefixes without a mask, on empty rows.

`FixedPacked` is what the packed graphs talk to; this module holds the plain torch form and what all forms share. The
keys of a pass are its own, for nothing is cached before it: they are read where they are made, and left in the pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.block import Fields
    from mstar_core.engine.attention.segments import PackedPrompts
    from mstar_core.layers.kv_view import KVView


class FixedPacked(Protocol):
    """Attention of one bucket of packed passes. Made once per captured graph."""

    @property
    def fields(self) -> Fields:
        """What it wants on the device."""

    def view(self, device: dict[str, Tensor]) -> KVView:
        """What the module attends with inside the graph. device: the fields, always in the same place."""

    def values(self, prompts: PackedPrompts) -> dict[str, np.ndarray]:
        """The fields for the next replay. The passes fit the bucket, and nothing is cached before them."""


class TorchFixedPacked:
    """The torch form: every packed token is compared with every other, and those of other passes are masked."""

    def __init__(self, pools: list[Tensor], page_size: int, tokens: int) -> None:
        self._pools = pools
        self._page_size = page_size
        self._tokens = tokens
        self._spare = (pools[0].shape[0] - 1) * 2 * page_size

    @property
    def fields(self) -> Fields:
        """See FixedPacked. of: the pass of each token; what is left over is one of its own."""
        return {"places": (torch.int64, self._tokens), "of": (torch.int32, self._tokens)}

    def view(self, device: dict[str, Tensor]) -> TorchPackedView:
        """See FixedPacked."""
        return TorchPackedView(self._pools, self._page_size, device)

    def values(self, prompts: PackedPrompts) -> dict[str, np.ndarray]:
        """See FixedPacked."""
        count, left = len(prompts.counts), self._tokens - int(prompts.counts.sum())
        of = np.repeat(np.arange(count + 1, dtype=np.int32), np.append(prompts.counts, left))
        return {"places": prompts.places(self._page_size, self._tokens, self._spare), "of": of}


class TorchPackedView:
    """The KVView of one bucket in the torch form."""

    def __init__(self, pools: list[Tensor], page_size: int, device: dict[str, Tensor]) -> None:
        self._pools = pools
        self._page_size = page_size
        self._device = device

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        self.keep(layer, key, value)
        pool, of = self._pools[layer], self._device["of"]
        own = key.to(pool.dtype), value.to(pool.dtype)
        groups = query.shape[1] // key.shape[1]
        keys, values = (each.transpose(0, 1).repeat_interleave(groups, dim=0)[None] for each in own)
        mask = (of[:, None] == of[None, :])[None, None]
        asked = query.to(pool.dtype).transpose(0, 1)[None]
        mixed = scaled_dot_product_attention(asked, keys, values, attn_mask=mask, scale=scale)
        return mixed[0].transpose(0, 1).to(query.dtype)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See KeepingView."""
        pool, places = self._pools[layer], self._device["places"]
        flat = pool.view(-1, pool.shape[3], pool.shape[4])
        flat.index_copy_(0, places, key.to(pool.dtype))
        flat.index_copy_(0, places + self._page_size, value.to(pool.dtype))
