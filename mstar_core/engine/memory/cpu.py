"""Sleeper of a CPU rank: empties the storages of tensors, and fills them again. All views of a storage stay valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mstar_core.engine.memory.node_memory import storage_key
from mstar_core.engine.memory.sleeper import Region, Sleeper, take_pairs

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

    from mstar_core.engine.memory.node_memory import LoadedAgain, MemoryContent
    from mstar_core.engine.memory.sleeper import Progress


@dataclass(slots=True, kw_only=True)
class StorageRegion(Region):
    """One storage. copy: its bytes while it sleeps, if it keeps them."""

    storage: UntypedStorage
    copy: Tensor | None = None


class CpuSleeper(Sleeper):
    """Sleeper whose device is the memory of the host. Storages over memory of others (mapped files) stay."""

    def _made(self, content: MemoryContent, tensors: Sequence[Tensor]) -> list[Region]:
        storages = [(storage_key(tensor), tensor.untyped_storage()) for tensor in tensors]
        return [
            StorageRegion(content=content, size_bytes=storage.nbytes(), storages=frozenset((key,)), storage=storage)
            for key, storage in storages
            if storage.resizable() and storage.nbytes()
        ]

    def _release(self, region: Region, *, keeps: bool) -> None:
        assert isinstance(region, StorageRegion)
        region.copy = _bytes(region.storage).clone() if keeps else None
        region.storage.resize_(0)

    def _forget(self, region: Region) -> None:
        assert isinstance(region, StorageRegion)
        region.copy = None

    def _restore(self, region: Region, pairs: list[LoadedAgain], progress: Progress) -> int:
        assert isinstance(region, StorageRegion)
        region.storage.resize_(region.size_bytes)
        if region.copy is not None:
            _bytes(region.storage).copy_(region.copy)
            region.copy = None
        elif region.is_dropped:
            for pair in take_pairs(region, pairs):
                pair.target.detach().copy_(pair.source)
        else:
            _bytes(region.storage).zero_()
        progress(region.size_bytes)
        return 0


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
