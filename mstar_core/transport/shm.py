"""Tensor transport between processes: small tensors inline, large ones in pooled shared memory.

The sender puts an array and sends its handle in a message. The reader gets the array and, when it no longer uses it,
sends TensorFreed to the owner, which releases the loan. A reader of another host fetches the array from the owner's
blob server first.
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
from mstar_core.transport.blobs.client import BlobClient, Fetch
from mstar_core.transport.blobs.server import BlobServer
from mstar_core.transport.dtypes import Array
from mstar_core.transport.mailbox import Mailbox
from mstar_core.transport.remote import RemoteAccess
from mstar_core.transport.tensors import inline, inline_array

T = TypeVar("T")

INLINE_BYTES = 32 * 1024  # below this size a copy through the socket is cheaper than a loan and its return
REMOTE_INLINE_BYTES = 256 * 1024  # below this size a tensor in the message is there before a fetch of it


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
        remote: RemoteAccess | None = None,
        remote_inline_bytes: int = REMOTE_INLINE_BYTES,
    ) -> None:
        """name, incarnation: of this process's mailbox. directory: for sockets, mode 0700.

        segment_bytes, max_bytes: of the arena. inline_bytes, remote_inline_bytes: maximum size of inline tensors for
        peers of this host and of others (-1: none). remote: serve and fetch tensors of other hosts.

        Raises TransportError when a socket or the memory cannot be created.
        """
        self.inline_bytes = inline_bytes
        self.remote_inline_bytes = remote_inline_bytes
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
        self._blobs: BlobServer | None = None
        self._fetches: BlobClient | None = None
        if remote is not None:
            try:
                self._blobs = BlobServer(self.arena, remote)
            except BaseException:
                self.close()
                raise
            self._fetches = BlobClient(remote.keys)

    @property
    def endpoint(self) -> str:
        """Endpoint at which peers map this process's tensors, announced by message."""
        return str(self._server.path)

    @property
    def blob_endpoint(self) -> str:
        """Endpoint at which peers of other hosts fetch this process's tensors, empty without `remote`."""
        return "" if self._blobs is None else self._blobs.endpoint

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
        if array.nbytes <= (self.remote_inline_bytes if self._is_away(to) else self.inline_bytes):
            self.sent_bytes += array.nbytes
            return inline(array, dtype)
        return self.lend(array, to, dtype=dtype)

    def lend(self, array: Array, to: str, *, dtype: str | None = None) -> ShmTensor:
        """Lend a copy of `array` to `to`, however small, for messages that hold many tensors. Raises as `put` does."""
        self.sent_bytes += array.nbytes
        return self.arena.put(array, to, dtype=dtype)

    def get(self, ref: TensorRef) -> Array:
        """Return the tensor, read-only and in place if possible; valid until its loan is returned.

        Raises TransportError when the owner is gone or the loan has ended, and for a tensor of another host.
        """
        return inline_array(ref) if isinstance(ref, InlineTensor) else self._reader.open(self._on_host(ref))

    def copy(self, ref: TensorRef) -> Array:
        """Return a writable copy without a loan. Raises as `get` does, also if the loan ends during the copy."""
        return self.read(ref, np.copy)

    def read(self, ref: TensorRef, copier: Callable[[Array], T]) -> T:
        """Return what `copier` copies of the tensor, which is read-only. Raises as `copy` does."""
        if isinstance(ref, InlineTensor):
            return copier(inline_array(ref))
        return self._reader.copy(self._on_host(ref), copier)

    def is_remote(self, ref: TensorRef) -> bool:
        """Return whether the tensor is in memory of another host, from which it has to be fetched."""
        return isinstance(ref, ShmTensor) and self._is_away(ref.owner)

    def fetch(self, ref: ShmTensor, then: Callable[[Fetch], None] | None = None) -> Fetch:
        """Begin to fetch a tensor of another host. Never blocks; the loan stays until it is returned, as with `get`.

        then: called on the main loop when the tensor has come or failed, never from within this call. It fails with
        TransportError if its owner is unknown or gone, its loan has ended, or nothing comes for 10 s.

        Raises TransportError without `remote`.
        """
        if self._fetches is None:
            raise TransportError("this process fetches no tensors of other hosts", str(ref), peer=ref.owner)
        return self._fetches.fetch(ref, then)

    def deliver_in(self, mailbox: Mailbox) -> None:
        """Run the callbacks of fetches in the loop that drains `mailbox`. Has no effect without `remote`."""
        if self._fetches is not None:
            mailbox.watch(self._fetches.fd, self._fetches.deliver)

    def deliver(self) -> None:
        """Run the callbacks of fetches that have ended, for loops without a mailbox."""
        if self._fetches is not None:
            self._fetches.deliver()

    def release(self, slot: int, generation: int) -> bool:
        """End a loan of this process. Returns False if it has ended already."""
        return self.arena.release(slot, generation)

    def connect(self, peer: str, endpoint: str, incarnation: int, blob_endpoint: str = "") -> None:
        """Register a peer before its first tensor is read. Late announcements are ignored.

        blob_endpoint: of a peer of another host, whose `endpoint` is not used; empty for one of this host.
        """
        if not blob_endpoint:
            self._reader.connect(peer, Path(endpoint), incarnation)
        elif self._fetches is not None:
            self._fetches.connect(peer, blob_endpoint, incarnation)

    def reclaim(self, peer: str, incarnation: int | None = None) -> int:
        """End the loans of a dead peer, unmap its memory, fail fetches from it. Returns the number of loans."""
        self._reader.forget(peer, incarnation)
        if self._fetches is not None:
            self._fetches.forget(peer, incarnation)
        return self.arena.reclaim(peer)

    def close(self) -> None:
        """Free everything. Safe to call twice. Call it after the mailbox of `deliver_in` is closed."""
        if self._fetches is not None:
            self._fetches.close()
        if self._blobs is not None:
            self._blobs.close()
        self._server.close()
        self._reader.close()
        self.arena.close()

    def _is_away(self, peer: str) -> bool:
        return self._fetches is not None and self._fetches.knows(peer)

    def _on_host(self, ref: TensorRef) -> ShmTensor:
        """Return the handle of a tensor in shared memory of this host. Raises TransportError for any other."""
        if not isinstance(ref, ShmTensor):
            raise TransportError(
                "a tensor in memory of another worker came to a process that reads shared memory only", str(type(ref))
            )
        if self._is_away(ref.owner):
            raise TransportError("a tensor of another host was read before it was fetched", str(ref), peer=ref.owner)
        return ref
