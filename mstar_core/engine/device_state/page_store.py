"""Copies of pages outside the pools: on the host after a preemption, or in staging tensors between two ranks.

Owned by the runner of a KV node, which keeps saved pages under the numbers that plans give them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.transfers import HostCopy, upload
from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor


GROUP_BYTES: Final = 64 << 20
"""Most bytes of one staging tensor of several layers: large enough for the full rate of a link."""


class PageStore:
    """Moves pages of all layers between the pools, the host and staging tensors.

    attached: pools of rows that belong to the pages, which do not go to another rank: no cache is shared there.
    """

    def __init__(self, pools: Sequence[Tensor], attached: Sequence[Tensor] = ()) -> None:
        self._pools = pools
        self._all = [*pools, *attached]
        self._saved: dict[int, Sequence[HostCopy | Tensor]] = {}

    def save(self, number: int, pages: Sequence[int]) -> None:
        """Start copying pages to the host, behind the steps in flight. The pages may be released at once."""
        source = self._indices(pages)
        self._saved[number] = [HostCopy(pool.index_select(0, source)) for pool in self._all]

    def keep(self, number: int, groups: Sequence[Tensor]) -> None:
        """Keep staging tensors of another rank as saved pages."""
        self._saved[number] = [layer for group in groups for layer in group.unbind(0)]

    def restore(self, number: int, pages: Sequence[int]) -> None:
        """Write the first saved pages into these pages of the pools."""
        target = self._indices(pages)
        for pool, saved in zip(self._all, self._saved[number], strict=False):  # pages that arrived have no rows
            layer = saved.wait() if isinstance(saved, HostCopy) else saved
            pool.index_copy_(0, target, upload(layer[: len(pages)], pool.device))

    def drop(self, numbers: Sequence[int]) -> None:
        """Free saved pages."""
        for number in numbers:
            self._saved.pop(number, None)

    def gather(self, pages: Sequence[int]) -> tuple[Tensor, ...]:
        """Copy pages of all layers behind the steps in flight, in token order. The pages may be released at once.

        Returns one contiguous tensor per group of layers, on the device of the pools:
        [layers, pages, 2, page_size, kv_heads, head_dim], of at most GROUP_BYTES or one layer.
        """
        source = self._indices(pages)
        layer_bytes = self._pools[0][0].nbytes * len(pages)
        step = max(1, GROUP_BYTES // max(layer_bytes, 1))
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

    def _indices(self, pages: Sequence[int]) -> Tensor:
        return upload(np.array(pages, dtype=np.int64), self._pools[0].device)
