"""Tensors in the arenas of other processes, read in place. Owned by `ShmTransport`."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mstar_core.errors import TransportError
from mstar_core.messages.tensors import ShmTensor
from mstar_core.transport.arena import COUNTER_BITS
from mstar_core.transport.dtypes import Array, check_size, storage
from mstar_core.transport.fd_server import fetch


@dataclass(frozen=True, slots=True)
class _Mapping:
    memory: mmap.mmap
    table: npt.NDArray[np.uint64]


@dataclass(slots=True)
class _Owner:
    path: Path
    incarnation: int
    mapping: _Mapping | None = None  # made with the first tensor: most peers never send any


class ArenaReader:
    """Maps each owner's arena once, read only."""

    def __init__(self, *, timeout_s: float = 2.0) -> None:
        """timeout_s: how long the first tensor of an owner may wait for its descriptor."""
        self._timeout_s = timeout_s
        self._owners: dict[str, _Owner] = {}

    @property
    def mapped(self) -> int:
        """How many arenas are mapped."""
        return sum(owner.mapping is not None for owner in self._owners.values())

    def connect(self, owner: str, path: Path, incarnation: int) -> None:
        """Note where the arena of `owner` is. A newer incarnation takes the place of an older one."""
        known = self._owners.get(owner)
        if known is not None and known.incarnation >= incarnation:
            return
        self.forget(owner)
        self._owners[owner] = _Owner(path, incarnation)

    def open(self, ref: ShmTensor) -> Array:
        """Return the tensor in place, read only. Valid until the caller tells the owner that it is freed.

        Raises TransportError when the owner is unknown or gone, or the loan has ended.
        """
        mapping = self._mapping(ref)
        self._check(ref, mapping)
        count = math.prod(ref.shape)
        return np.frombuffer(mapping.memory, storage(ref.dtype), count, ref.offset).reshape(ref.shape)

    def copy(self, ref: ShmTensor) -> Array:
        """Return a writable copy. Raises as `open` does, also when the loan ended during the copy."""
        copied = self.open(ref).copy()
        self._check(ref, self._mapping(ref))
        return copied

    def forget(self, owner: str, incarnation: int | None = None) -> None:
        """Unmap the arena of an owner that is gone; arrays that are still in use keep their memory until they end.

        incarnation: the life that ended; a newer one that is known by now stays.
        """
        known = self._owners.get(owner)
        if known is None or (incarnation is not None and known.incarnation > incarnation):
            return
        # Never closed by hand: each array in use holds the mapping, and the last reference unmaps it. Closing it under
        # an array would be a segmentation fault at the next read.
        del self._owners[owner]

    def close(self) -> None:
        """Forget all owners. Safe to call twice."""
        for owner in list(self._owners):
            self.forget(owner)

    def _mapping(self, ref: ShmTensor) -> _Mapping:
        owner = self._owners.get(ref.owner)
        if owner is None:
            raise TransportError(
                "the owner of a tensor is gone", f"no shared memory of {ref.owner} is known here", peer=ref.owner
            )
        if ref.generation >> COUNTER_BITS != owner.incarnation:
            raise self._ended(ref)
        if owner.mapping is None:
            owner.mapping = self._map(ref.owner, owner)
        return owner.mapping

    def _map(self, name: str, owner: _Owner) -> _Mapping:
        try:
            fd, shape = fetch(owner.path, self._timeout_s)
            try:
                memory = mmap.mmap(fd, shape.size_bytes, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
        except OSError as error:
            raise TransportError(
                "the shared memory of a peer cannot be mapped", f"{name} at {owner.path}: {error}", peer=name
            ) from error
        return _Mapping(memory, np.frombuffer(memory, dtype=np.uint64, count=shape.slots))

    def _check(self, ref: ShmTensor, mapping: _Mapping) -> None:
        check_size(ref.dtype, ref.shape, ref.size_bytes)
        within = mapping.table.nbytes <= ref.offset and ref.offset + ref.size_bytes <= len(mapping.memory)
        if not within or not 0 <= ref.slot < len(mapping.table):
            raise TransportError("a tensor handle points outside its owner's memory", str(ref), peer=ref.owner)
        if int(mapping.table[ref.slot]) != ref.generation:
            raise self._ended(ref)

    @staticmethod
    def _ended(ref: ShmTensor) -> TransportError:
        return TransportError(
            "a tensor was taken back before it was read",
            f"slot {ref.slot} of {ref.owner}, generation {ref.generation}",
            peer=ref.owner,
        )
