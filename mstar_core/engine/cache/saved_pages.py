"""Copies of a sequence's pages outside the pools: on the host after a preemption, or on the way to another rank.

Used by the KV scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch

from mstar_core.engine.transfers import HostCopy, upload
from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor


GROUP_BYTES: Final = 64 << 20
"""Most bytes of one staging tensor of several layers: large enough for the full rate of a link."""


class LayerCopy(Protocol):
    """A copy of one layer's pages, [pages, 2, page_size, kv_heads, head_dim], perhaps still under way."""

    def wait(self) -> Tensor:
        """Return the copy once it is complete."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """One layer's pages that came from another rank."""

    pages: Tensor

    def wait(self) -> Tensor:
        """Return the pages."""
        return self.pages


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SavedPages:
    """Copies of a sequence's pages in token order, one per layer: [pages, 2, page_size, kv_heads, head_dim].

    number: of the copy, as followers of a tensor-parallel group know it.
    """

    layers: tuple[LayerCopy, ...]
    number: int = 0

    @classmethod
    def arrived(cls, groups: Sequence[Tensor]) -> SavedPages:
        """Return the pages of staging tensors, see `PageStore.gather`."""
        return cls(tuple(Arrived(layer) for group in groups for layer in group.unbind(0)))


class PageStore:
    """Moves pages of all layers between the pools and the host. Owned by the KV engine of one node."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        self._pools = pools
        self._saved = 0

    def save(self, pages: Sequence[int]) -> SavedPages:
        """Start copying pages to the host, behind the steps in flight. The pages may be released at once."""
        self._saved += 1
        with torch.inference_mode():
            source = self._indices(pages)
            return SavedPages(tuple(HostCopy(pool.index_select(0, source)) for pool in self._pools), self._saved)

    def gather(self, pages: Sequence[int]) -> tuple[Tensor, ...]:
        """Copy pages of all layers behind the steps in flight, in token order. The pages may be released at once.

        Returns one contiguous tensor per group of layers, on the device of the pools:
        [layers, pages, 2, page_size, kv_heads, head_dim], of at most GROUP_BYTES or one layer.
        """
        with torch.inference_mode():
            source = self._indices(pages)
            one = self._pools[0][0].nbytes * len(pages)
            step = max(1, GROUP_BYTES // max(one, 1))
            groups = []
            for first in range(0, len(self._pools), step):
                pools = self._pools[first : first + step]
                group = pools[0].new_empty((len(pools), len(pages), *pools[0].shape[1:]))
                for pool, into in zip(pools, group.unbind(0), strict=True):
                    torch.index_select(pool, 0, source, out=into)
                groups.append(group)
            return tuple(groups)

    def check(self, groups: Sequence[Tensor], pages: int) -> None:
        """Raise EngineError unless staging tensors fit the pools: their layers, page form and dtype."""
        shape, dtype = self._pools[0].shape[1:], self._pools[0].dtype
        layers = sum(group.shape[0] for group in groups)
        fits = all(group.shape[1:] == (pages, *shape) and group.dtype is dtype for group in groups)
        if layers != len(self._pools) or not fits:
            raise EngineError(
                "a cache that came from another rank does not fit the pools of this one",
                f"{[list(group.shape) for group in groups]}; expected {len(self._pools)} layers of {pages} pages of "
                f"{list(shape)}, {dtype}",
                "give both ranks the same page size, dtype and tp_size",
            )

    def restore(self, saved: SavedPages, pages: Sequence[int]) -> None:
        """Write the first saved pages into these pages of the pools."""
        with torch.inference_mode():
            target = self._indices(pages)
            for pool, copy in zip(self._pools, saved.layers, strict=True):
                pool.index_copy_(0, target, upload(copy.wait()[: len(pages)], pool.device))

    def _indices(self, pages: Sequence[int]) -> Tensor:
        return upload(np.array(pages, dtype=np.int64), self._pools[0].device)
