"""Interface of tensor transports and the table of implementations. Used by worker and api.

The sender puts an array and sends its handle in a message. The reader gets the array and, when it no longer uses it,
sends TensorFreed to the owner, which releases the loan.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from mstar_core.messages.tensors import InlineTensor, ShmTensor, TensorRef
from mstar_core.transport.dtypes import Array, check_size, name_of, storage


class Loan(NamedTuple):
    """Loan of a tensor; the reader returns it to `owner` after use."""

    owner: str
    slot: int
    generation: int


class TensorTransport(Protocol):
    """One process's end. Not thread-safe. Only the first `get` from a new owner may block."""

    def put(self, array: Array, to: str, *, dtype: str | None = None) -> TensorRef:
        """Lend a copy of `array` to `to`. dtype: the true name if numpy lacks the type (bfloat16 as uint16).

        Raises ArenaFull, TransportError.
        """
        ...

    def get(self, ref: TensorRef) -> Array:
        """Return the tensor, read-only and in place if possible; valid until its loan is returned.

        Raises TransportError when the owner is gone or the loan has ended.
        """
        ...

    def copy(self, ref: TensorRef) -> Array:
        """Return a writable copy without a loan. Raises as `get` does."""
        ...

    def release(self, slot: int, generation: int) -> bool:
        """End a loan of this process. Returns False if it has ended already."""
        ...

    @property
    def endpoint(self) -> str:
        """Endpoint at which peers map this process's tensors, announced by message."""
        ...

    def connect(self, peer: str, endpoint: str, incarnation: int) -> None:
        """Register a peer before its first tensor is read. Late announcements are ignored."""
        ...

    def reclaim(self, peer: str, incarnation: int | None = None) -> int:
        """End the loans of a dead peer and unmap its memory. Returns the number of loans."""
        ...

    @property
    def live(self) -> int:
        """Number of open loans."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes in open loans."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes of all tensors sent so far."""
        ...

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        ...


def loan_of(ref: TensorRef) -> Loan | None:
    """Return the loan of `ref`, or None for an inline tensor."""
    return Loan(ref.owner, ref.slot, ref.generation) if isinstance(ref, ShmTensor) else None


def inline(array: Array, dtype: str | None = None) -> InlineTensor:
    """Return a handle that contains the elements of `array`. Raises TransportError for an unsupported type."""
    name = name_of(array, dtype)
    data = array.astype(storage(name), copy=False).tobytes()  # in C order whatever the strides are
    return InlineTensor(dtype=name, shape=array.shape, data=data)


def inline_array(ref: InlineTensor) -> Array:
    """Return the elements of an inline tensor, read-only. Raises TransportError when size and shape disagree."""
    check_size(ref.dtype, ref.shape, len(ref.data))
    array: Array = np.frombuffer(ref.data, dtype=storage(ref.dtype)).reshape(ref.shape)
    return array
