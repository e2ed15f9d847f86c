"""Reads of tensors in the shared memory of processes on other hosts, through their blob servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar_core.errors import TransportError
from mstar_core.messages.tensors import ShmTensor, TensorRef
from mstar_core.transport.blobs.client import Fetch
from mstar_core.transport.shm import TensorTransport
from mstar_core.transport.tensors import Loan, loan_of
from mstar_core.worker.arrays import to_tensor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class _BlobRead:
    """A fetch that several runs may wait for. uses: how often it will be taken or dropped."""

    fetch: Fetch
    uses: int = 1


class BlobReads:
    """One worker's reads. Owned by its loop. received_bytes: of all tensors so far."""

    must_poll = False  # the end of a fetch wakes the mailbox

    def __init__(self, transport: TensorTransport, is_elsewhere: Callable[[str], bool]) -> None:
        """is_elsewhere: whether a process is, or was, on another host."""
        self.received_bytes = 0
        self._transport = transport
        self._is_elsewhere = is_elsewhere
        self._reads: dict[Loan, _BlobRead] = {}

    @property
    def reading(self) -> int:
        """Number of tensors that were begun and neither taken nor dropped."""
        return len(self._reads)

    def reads(self, ref: TensorRef) -> bool:
        """Return whether a tensor is in the shared memory of another host."""
        return isinstance(ref, ShmTensor) and self._is_elsewhere(ref.owner)

    def begin(self, ref: TensorRef) -> None:
        """Begin to fetch a tensor, once for all that use it. Raises TransportError if its owner is gone."""
        assert isinstance(ref, ShmTensor), "see `reads`"
        read = self._reads.get(_key(ref))
        if read is not None:
            read.uses += 1
            return
        self._reads[_key(ref)] = _BlobRead(self._transport.fetch(ref))
        self.received_bytes += ref.size_bytes

    def is_ready(self, ref: TensorRef) -> bool:
        """Return whether a fetch has ended. One that was dropped counts as ready."""
        read = self._reads.get(_key(ref))
        return read is None or read.fetch.is_done

    def failure(self, ref: TensorRef) -> TransportError | None:
        """Return why a tensor that is ready cannot be taken, None if it can."""
        read = self._reads.get(_key(ref))
        if read is None:
            return None
        try:
            read.fetch.result()
        except TransportError as error:
            return error
        return None

    def take(self, ref: TensorRef) -> Tensor:
        """Return a tensor that has come. Raises TransportError if it has not, or cannot."""
        read = self._reads.get(_key(ref))
        if read is None:
            raise TransportError("a tensor of another host was not fetched", str(loan_of(ref)))
        self.drop(ref)
        return to_tensor(read.fetch.result(), ref.dtype, is_shared=read.uses > 0)

    def drop(self, ref: TensorRef) -> None:
        """Forget a tensor whose request has ended, unless another run of the request uses it."""
        read = self._reads.get(_key(ref))
        if read is None:
            return
        read.uses -= 1
        if not read.uses:
            del self._reads[_key(ref)]
            read.fetch.cancel()


def _key(ref: TensorRef) -> Loan:
    loan = loan_of(ref)
    assert loan is not None, "see `BlobReads.reads`"
    return loan
