"""Rows of output ports that are kept beside the cached pages, see `Attachment`. Owned by the runner of a KV node.

Cost model: one scatter per pass and port when a pass is computed, one gather when its tokens are found in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar_core.engine.transfers import upload

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.steps.updates import PageCopy
    from mstar_core.graph.declare.nodes import KVSpec


class AttachedRows:
    """One pool per attached port: [pages, page_size, width] in the node's dtype. A row is read only after a write."""

    def __init__(self, spec: KVSpec, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._page_size = page_size
        self._pools = {
            each.port: torch.zeros((pages, page_size, each.width), dtype=dtype, device=device) for each in spec.attached
        }

    @property
    def pools(self) -> Sequence[Tensor]:
        """Pools of all ports."""
        return list(self._pools.values())

    def write(self, ports: Mapping[str, Tensor], table: np.ndarray, first: int) -> None:
        """Write the rows of a pass. ports: [tokens, width]; table: its pages, int32; first: cached tokens before it."""
        for port, pool in self._pools.items():
            if port in ports:
                values = ports[port]
                places = self._places(table, first, len(values))
                pool.flatten(0, 1).index_copy_(0, upload(places, pool.device), values.to(pool.dtype))

    def read(self, port: str, table: np.ndarray, first: int, count: int) -> Tensor:
        """Return copies of the rows of cached tokens, [count, width]. table: their pages, int32, in token order."""
        pool = self._pools[port]
        return pool.flatten(0, 1).index_select(0, upload(self._places(table, first, count), pool.device))

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages before the next forward."""
        for pool in self._pools.values():
            source, target = upload(np.array(copies, dtype=np.int64).T.copy(), pool.device)
            pool.index_copy_(0, target, pool.index_select(0, source))

    def _places(self, table: np.ndarray, first: int, count: int) -> np.ndarray:
        """Return the places of tokens in a flat pool: int64 [count]."""
        tokens = np.arange(first, first + count)
        places: np.ndarray = table[tokens // self._page_size].astype(np.int64) * self._page_size
        return places + tokens % self._page_size
