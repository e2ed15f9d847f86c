"""Tensor transport between processes of one host: small tensors inline, large ones in pooled shared memory.

The sender puts an array and sends its handle in a message. The reader gets the array and, when it no longer uses it,
sends TensorFreed to the owner, which releases the loan.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from mstar_core.closing import Closing
from mstar_core.errors import TransportError
from mstar_core.messages.tensors import InlineTensor, ShmTensor, TensorRef
from mstar_core.transport.address import arena_path
from mstar_core.transport.arena import MIB, Arena, ArenaReader, FdServer
from mstar_core.transport.dtypes import Array
from mstar_core.transport.tensors import inline, inline_array

T = TypeVar("T")

INLINE_BYTES = 32 * 1024  # below this size a copy through the socket is cheaper than a loan and its return


class TensorTransport(Closing):
    """One process's end. Owns its arena, the arena's descriptor server and the mappings of peers. Not thread-safe.

    sent_bytes: of all tensors so far. Only the first `get` from a new owner may block.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        directory: Path,
        *,
        segment_bytes: int = 8 * MIB,
        max_bytes: int = 4096 * MIB,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        """name, incarnation: of this process's mailbox. directory: for sockets, mode 0700.

        segment_bytes, max_bytes: of the arena. inline_bytes: maximum size of inline tensors (-1: none).

        Raises TransportError when the socket or the memory cannot be created.
        """
        self.inline_bytes = inline_bytes
        self.sent_bytes = 0
        self._reader = ArenaReader()
        self.arena = Arena(name, incarnation=incarnation, segment_bytes=segment_bytes, max_bytes=max_bytes)
        try:
            # Otherwise the first request would pay for the page faults.
            self.arena.reserve(min(self.arena.segment_bytes, self.arena.max_bytes))
            self._server = FdServer(arena_path(directory, name, incarnation), self.arena)
        except BaseException:
            self.arena.close()
            raise

    @property
    def endpoint(self) -> str:
        """Endpoint at which peers map this process's tensors, announced by message."""
        return str(self._server.path)

    @property
    def live(self) -> int:
        """Number of open loans."""
        return self.arena.live

    @property
    def used_bytes(self) -> int:
        """Bytes in open loans."""
        return self.arena.used_bytes

    def put(self, array: Array, to: str, *, dtype: str | None = None) -> TensorRef:
        """Lend a copy of `array` to `to`. dtype: the true name if numpy lacks the type (bfloat16 as uint16).

        Raises ArenaFull, TransportError.
        """
        self.sent_bytes += array.nbytes
        if array.nbytes <= self.inline_bytes:
            return inline(array, dtype)
        return self.arena.put(array, to, dtype=dtype)

    def get(self, ref: TensorRef) -> Array:
        """Return the tensor, read-only and in place if possible; valid until its loan is returned.

        Raises TransportError when the owner is gone or the loan has ended.
        """
        return inline_array(ref) if isinstance(ref, InlineTensor) else self._reader.open(_on_host(ref))

    def copy(self, ref: TensorRef) -> Array:
        """Return a writable copy without a loan. Raises as `get` does, also if the loan ends during the copy."""
        return self.read(ref, np.copy)

    def read(self, ref: TensorRef, copier: Callable[[Array], T]) -> T:
        """Return what `copier` copies of the tensor, which is read-only. Raises as `copy` does."""
        return copier(inline_array(ref)) if isinstance(ref, InlineTensor) else self._reader.copy(_on_host(ref), copier)

    def release(self, slot: int, generation: int) -> bool:
        """End a loan of this process. Returns False if it has ended already."""
        return self.arena.release(slot, generation)

    def connect(self, peer: str, endpoint: str, incarnation: int) -> None:
        """Register a peer before its first tensor is read. Late announcements are ignored."""
        self._reader.connect(peer, Path(endpoint), incarnation)

    def reclaim(self, peer: str, incarnation: int | None = None) -> int:
        """End the loans of a dead peer and unmap its memory. Returns the number of loans."""
        self._reader.forget(peer, incarnation)
        return self.arena.reclaim(peer)

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        self._server.close()
        self._reader.close()
        self.arena.close()


def _on_host(ref: TensorRef) -> ShmTensor:
    """Return the handle of a tensor in shared memory. Raises TransportError for one that only workers can read."""
    if isinstance(ref, ShmTensor):
        return ref
    raise TransportError(
        "a tensor in memory of another worker came to a process that reads shared memory only", str(type(ref))
    )
