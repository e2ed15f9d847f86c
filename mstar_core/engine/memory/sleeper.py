"""Sleepers: give the device memory of nodes back and take it again. Used by a worker's `RankSleep`, from one thread.

A region is memory that one or several nodes use. It sleeps once all of them sleep, and wakes with the first one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.memory.node_memory import MemoryContent, storage_key

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.memory.node_memory import LoadedAgain, NodeMemory

DROPS: Final = 2
"""Level of a sleep that drops weights."""

Progress = Callable[[int], None]
"""Called with bytes that were copied since the last call."""


def ignore(size: int) -> None:
    """Report no progress."""


@dataclass(slots=True, kw_only=True)
class Region:
    """Memory that sleeps as one. tags: nodes that use it. storages: identities of the storages that are in it.

    kept_bytes: bytes of host memory of its copy, which a placed region may keep after a wake.
    """

    content: MemoryContent
    size_bytes: int
    storages: frozenset[int]
    tags: set[str] = field(default_factory=set)
    is_asleep: bool = False
    is_dropped: bool = False
    kept_bytes: int = 0


class Sleeper(ABC):
    """Regions of one device by tag. Owned by the worker's `RankSleep`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._regions: list[Region] = []
        self._asleep: set[str] = set()

    def hold(self, tag: str, memory: NodeMemory) -> None:
        """Register the memory of a node, before any captured step reads its addresses."""
        for content, tensors in memory.contents(self.device).items():
            new = []
            for tensor in tensors:
                known = next((r for r in self._regions if storage_key(tensor) in r.storages), None)
                if known is None:
                    new.append(tensor)
                else:
                    known.tags.add(tag)
                    if content is MemoryContent.KEPT and known.content is MemoryContent.WEIGHTS:
                        known.content = MemoryContent.KEPT
            for region in self._made(content, new):
                region.tags.add(tag)
                self._regions.append(region)

    def regions(self, tag: str) -> list[Region]:
        """Return the regions of a node."""
        return [region for region in self._regions if tag in region.tags]

    @property
    def kept_bytes(self) -> int:
        """Bytes of host memory that copies of regions need."""
        return sum(region.kept_bytes for region in self._regions)

    @property
    def placed_bytes(self) -> int:
        """Bytes of the device that regions have outside the allocator of PyTorch."""
        return 0

    @property
    def asleep_bytes(self) -> int:
        """Bytes of the device that sleeping regions have given back."""
        return sum(region.size_bytes for region in self._regions if region.is_asleep)

    def pause(self, tag: str, level: int) -> int:
        """Give back the memory that only this node and other sleeping ones use. Returns its bytes.

        No work on the device may use it. level: 1 keeps weights on the host, 2 drops them, also those of a sleep of
        level 1.
        """
        self._asleep.add(tag)
        freed = 0
        for region in self.regions(tag):
            if not region.tags <= self._asleep:
                continue
            is_lost = region.content is MemoryContent.SCRATCH or (
                region.content is MemoryContent.WEIGHTS and level >= DROPS
            )
            if region.is_asleep:
                if is_lost and region.kept_bytes:
                    self._forget(region)
                    region.is_dropped, region.kept_bytes = True, 0
                continue
            self._release(region, keeps=not is_lost)
            region.is_asleep = True
            region.is_dropped = is_lost and region.content is MemoryContent.WEIGHTS
            region.kept_bytes = 0 if is_lost else region.size_bytes
            freed += region.size_bytes
        return freed

    def dropped(self, tags: Collection[str]) -> frozenset[int]:
        """Return the storages of these nodes whose weights must be loaded again."""
        return frozenset(
            storage
            for region in self._regions
            if region.is_dropped and not region.tags.isdisjoint(tags)
            for storage in region.storages
        )

    def loads(self, tags: Collection[str]) -> set[str]:
        """Return the nodes whose weights must be loaded again for these to wake: they may share regions with others."""
        dropped = (region for region in self._regions if region.is_dropped and not region.tags.isdisjoint(tags))
        return set[str]().union(*(region.tags for region in dropped))

    def resume(self, tags: Collection[str], pairs: list[LoadedAgain], progress: Progress = ignore) -> int:
        """Take the memory of these nodes again, with its values. Returns its bytes.

        pairs: values of the weights that were dropped; they are taken out, so that their memory is freed on the way.
        Raises torch.OutOfMemoryError if the device has no room; what was taken stays taken.
        """
        self._asleep -= set(tags)
        taken = 0
        waking = [region for region in self._regions if region.is_asleep and not region.tags.isdisjoint(tags)]
        for region in sorted(
            waking, key=lambda region: region.content is MemoryContent.SCRATCH
        ):  # pools take what is left
            region.kept_bytes = self._restore(region, pairs, progress)
            region.is_asleep = region.is_dropped = False
            taken += region.size_bytes
        return taken

    @abstractmethod
    def _made(self, content: MemoryContent, tensors: Sequence[Tensor]) -> list[Region]:
        """Return regions of tensors, one for each storage."""

    @abstractmethod
    def _release(self, region: Region, *, keeps: bool) -> None:
        """Give back the memory of a region, after a copy to the host if it keeps its values and has none."""

    @abstractmethod
    def _forget(self, region: Region) -> None:
        """Drop the copy of a sleeping region."""

    @abstractmethod
    def _restore(self, region: Region, pairs: list[LoadedAgain], progress: Progress) -> int:
        """Take the memory of a region again and restore its values: from the host, from `pairs`, or zero.

        Returns the bytes of the copy on the host that stays.
        """


def take_pairs(region: Region, pairs: list[LoadedAgain]) -> list[LoadedAgain]:
    """Take the pairs of a region out of a list."""
    mine = [pair for pair in pairs if storage_key(pair.target) in region.storages]
    pairs[:] = [pair for pair in pairs if storage_key(pair.target) not in region.storages]
    return mine
