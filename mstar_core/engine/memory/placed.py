"""Sleeper of a GPU rank: places the memory of nodes in address ranges whose memory comes and goes.

The addresses stay, so captured CUDA graphs stay valid. Each content of a node is one range, mapped in chunks.
"""

from __future__ import annotations

import gc
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.memory.node_memory import MemoryContent, storage_key
from mstar_core.engine.memory.sleeper import Region, Sleeper, ignore, take_pairs

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.memory.node_memory import LoadedAgain
    from mstar_core.engine.memory.sleeper import Progress
    from mstar_core.engine.memory.virtual_memory import VirtualMemory

CHUNK_BYTES: Final = 256 << 20
"""Memory that is mapped, or copied, at once. PyTorch pins memory in powers of two."""

ALIGN: Final = 512
"""Alignment of each storage, as PyTorch's allocator has it."""


@dataclass(slots=True, kw_only=True)
class PlacedRegion(Region):
    """A range of addresses. flat: its bytes. mapped: bytes from its start that have memory. copies: of its chunks."""

    address: int
    flat: Tensor
    mapped: int = 0
    copies: list[Tensor] = field(default_factory=list)


class PlacedSleeper(Sleeper):
    """Sleeper over virtual memory. It moves tensors when it gets them, before anything keeps their addresses.

    keeps_copies: weights keep their copy on the host after a wake. They do not change, so that the next sleep copies
    nothing. Pinning and freeing that memory takes longer than the copies themselves.
    """

    def __init__(
        self,
        device: torch.device,
        memory: VirtualMemory,
        chunk_bytes: int = CHUNK_BYTES,
        *,
        keeps_copies: bool = False,
    ) -> None:
        super().__init__(device)
        self._memory = memory
        self.keeps_copies = keeps_copies
        self._chunk = max(chunk_bytes, memory.granularity) // memory.granularity * memory.granularity

    @property
    def placed_bytes(self) -> int:
        """Bytes of the device that all regions have now."""
        return sum(region.mapped for region in self._regions if isinstance(region, PlacedRegion))

    def _made(self, content: MemoryContent, tensors: Sequence[Tensor]) -> list[Region]:
        tensors = [tensor for tensor in tensors if tensor.untyped_storage().nbytes()]
        if not tensors:
            return []
        ends = itertools.accumulate(_aligned(tensor.untyped_storage().nbytes(), ALIGN) for tensor in tensors)
        places = [0, *ends]
        size = _aligned(places.pop(), self._memory.granularity)
        address = self._memory.reserve(size)
        self._memory.map(address, first := min(size, self._chunk))
        region = PlacedRegion(
            content=content,
            size_bytes=size,
            storages=frozenset(),
            address=address,
            flat=self._memory.tensor(address, size),
            mapped=first,
        )
        views = views_of(tensors)
        keys = [storage_key(tensor) for tensor in tensors]
        del tensors
        with torch.inference_mode():  # also writes tensors that were made in it
            self._move(region, views, list(zip(keys, places, strict=True)))
        region.storages = frozenset((storage_key(region.flat),))
        return [region]

    def _move(self, region: PlacedRegion, views: dict[int, list[Tensor]], places: list[tuple[int, int]]) -> None:
        """Move storages to their places in a region. views: taken out one by one, so that memory is freed."""
        is_empty = region.content is MemoryContent.SCRATCH
        moved = 0
        for key, place in places:
            mine = views.pop(key)
            source = mine[0].untyped_storage()
            size = source.nbytes()
            if not is_empty:
                self._map(region, place + size)
                region.flat[place : place + size].copy_(_bytes(mine[0]))
            for view in mine:
                offset = place // view.element_size() + int(view.storage_offset())
                view.set_(region.flat.untyped_storage(), offset, view.size(), view.stride())
            del mine, source
            moved += size
            if moved >= self._chunk:
                moved = 0
                self._memory.settle()
        self._memory.settle()
        self._map(region, region.size_bytes)
        if is_empty:
            region.flat.zero_()

    def _release(self, region: Region, *, keeps: bool) -> None:
        assert isinstance(region, PlacedRegion)
        self._memory.settle()
        if not keeps:
            region.copies.clear()
        elif not region.copies:
            for start, size in self._chunks(region):
                copy = self._memory.host(size)
                copy.copy_(region.flat[start : start + size], non_blocking=True)
                region.copies.append(copy)
            self._memory.settle()
        for start, size in self._chunks(region):
            self._memory.unmap(region.address + start, size)
        region.mapped = 0

    def _forget(self, region: Region) -> None:
        assert isinstance(region, PlacedRegion)
        region.copies.clear()
        self._memory.settle()

    def _restore(self, region: Region, pairs: list[LoadedAgain], progress: Progress = ignore) -> int:
        assert isinstance(region, PlacedRegion)
        self._memory.settle()
        if region.copies:
            for (start, size), copy in zip(self._chunks(region), region.copies, strict=True):
                self._map(region, start + size)
                region.flat[start : start + size].copy_(copy, non_blocking=True)
                progress(size)
        elif region.is_dropped:
            self._fill(region, take_pairs(region, pairs))
        else:
            self._map(region, region.size_bytes)
            region.flat.zero_()
            progress(region.size_bytes)
        self._memory.settle()
        if not (self.keeps_copies and region.content is MemoryContent.WEIGHTS):
            region.copies.clear()
        self._map(region, region.size_bytes)
        return sum(copy.nbytes for copy in region.copies)

    def _fill(self, region: PlacedRegion, pairs: list[LoadedAgain]) -> None:
        """Copy weights that were loaded again to their places, and free each: both together would not fit."""
        pairs.sort(key=lambda pair: pair.target.data_ptr(), reverse=True)
        moved = 0
        while pairs:
            pair = pairs.pop()
            self._map(region, pair.target.data_ptr() - region.address + _reach(pair.target))
            pair.target.detach().copy_(pair.source)
            moved += pair.source.nbytes
            del pair
            if moved >= self._chunk:
                moved = 0
                self._memory.settle()

    def _map(self, region: PlacedRegion, end: int) -> None:
        """Map the chunks of a region up to an end."""
        for start, size in self._chunks(region):
            if region.mapped <= start < end:
                self._memory.map(region.address + start, size)
                region.mapped = start + size

    def _chunks(self, region: PlacedRegion) -> Iterator[tuple[int, int]]:
        """Yield the start and the size of each chunk."""
        for start in range(0, region.size_bytes, self._chunk):
            yield start, min(self._chunk, region.size_bytes - start)


def views_of(tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Return all tensors of this process that share a storage with one of these, by storage.

    Those that only C++ holds are not found: they keep the old storage, and its values.
    """
    views: defaultdict[int, list[Tensor]] = defaultdict(list)
    keys = {storage_key(tensor) for tensor in tensors}
    for found in gc.get_objects():
        if not issubclass(type(found), torch.Tensor) or found.is_meta or not torch._C._has_storage(found):
            continue
        if (key := storage_key(found)) in keys:
            views[key].append(found)
    return dict(views)


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _reach(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last one."""
    last = sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
