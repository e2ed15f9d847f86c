"""Pages of a preempted sequence on the host, for caches that cannot be recomputed. Used by the KV scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar_core.engine.transfers import HostCopy, upload

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SavedPages:
    """Copies of a sequence's pages in token order, one per layer: [pages, 2, page_size, kv_heads, head_dim]."""

    layers: tuple[HostCopy, ...]


class PageStore:
    """Moves pages of all layers between the pools and the host. Owned by the KV engine of one node."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        self._pools = pools

    def save(self, pages: Sequence[int]) -> SavedPages:
        """Start copying pages to the host, behind the steps in flight. The pages may be released at once."""
        with torch.inference_mode():
            source = self._indices(pages)
            return SavedPages(tuple(HostCopy(pool.index_select(0, source)) for pool in self._pools))

    def restore(self, saved: SavedPages, pages: Sequence[int]) -> None:
        """Write the first saved pages into these pages of the pools."""
        with torch.inference_mode():
            target = self._indices(pages)
            for pool, copy in zip(self._pools, saved.layers, strict=True):
                pool.index_copy_(0, target, upload(copy.wait()[: len(pages)], pool.device))

    def _indices(self, pages: Sequence[int]) -> Tensor:
        return upload(np.array(pages, dtype=np.int64), self._pools[0].device)
