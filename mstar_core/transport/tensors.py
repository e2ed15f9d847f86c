"""How tensors move between processes: the interface, and the table of implementations. Used by worker and api.

The sender puts an array and sends the handle in a message; the reader gets it and, when it no longer uses the array,
tells the owner by message, who then releases the loan.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from mstar_core.errors import NotFound, did_you_mean, nearest
from mstar_core.messages.tensors import InlineTensor, ShmTensor, TensorRef
from mstar_core.transport.dtypes import Array, check_size, name_of, storage


class Loan(NamedTuple):
    """What a reader sends back to `owner` when it no longer uses a tensor."""

    owner: str
    slot: int
    generation: int


class TensorTransport(Protocol):
    """One process's end. Not thread safe; each method returns at once, but for the first `get` from a new owner."""

    def put(self, array: Array, to: str, *, dtype: str | None = None) -> TensorRef:
        """Lend a copy of `array` to `to`. dtype: the true name where numpy cannot say it (bfloat16 as uint16).

        Raises ArenaFull, TransportError.
        """
        ...

    def get(self, ref: TensorRef) -> Array:
        """Return the tensor, read only and where possible in place; valid until its loan is given back.

        Raises TransportError when the owner is gone or the loan has ended.
        """
        ...

    def copy(self, ref: TensorRef) -> Array:
        """Return a writable copy, valid for ever. Raises as `get` does."""
        ...

    def release(self, slot: int, generation: int) -> bool:
        """End a loan that this process made. Returns False when it has ended already."""
        ...

    @property
    def endpoint(self) -> str:
        """Where peers find this process's tensors; they are told by message."""
        ...

    def connect(self, peer: str, endpoint: str, incarnation: int) -> None:
        """Note that a peer is up, before its first tensor is read. An announcement that is late is ignored."""
        ...

    def reclaim(self, peer: str, incarnation: int | None = None) -> int:
        """A peer is dead: end its loans, let go of its memory. Returns how many loans."""
        ...

    @property
    def live(self) -> int:
        """Loans that have not ended."""
        ...

    @property
    def used_bytes(self) -> int:
        """Memory in loans."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes of all tensors that were put so far."""
        ...

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        ...


class TransportFactory(Protocol):
    """What a target of TRANSPORTS is."""

    def __call__(self, name: str, incarnation: int, directory: Path) -> TensorTransport: ...


TRANSPORTS = {
    "SHM": "mstar_core.transport.shm:ShmTransport",
    "TCP": "mstar_core.transport.mooncake:open_tcp",
    "RDMA": "mstar_core.transport.mooncake:open_rdma",
}


def open_transport(protocol: str, *, name: str, incarnation: int, directory: Path) -> TensorTransport:
    """Open the tensor transport of the process `name`. protocol: `--tensor-comm-protocol`. directory: of its sockets.

    Raises NotFound for an unknown protocol, TransportError when it cannot run here.
    """
    target = TRANSPORTS.get(protocol)
    if target is None:
        raise NotFound(
            f"no tensor transport is called {protocol!r}",
            hint=did_you_mean(protocol, TRANSPORTS),
            kind="tensor transport",
            name=protocol,
            nearest=nearest(protocol, TRANSPORTS),
        )
    module, _, attribute = target.partition(":")
    factory: TransportFactory = vars(importlib.import_module(module))[attribute]
    return factory(name, incarnation, directory)


def loan_of(ref: TensorRef) -> Loan | None:
    """Return what must be given back for `ref`, None when nothing."""
    return Loan(ref.owner, ref.slot, ref.generation) if isinstance(ref, ShmTensor) else None


def inline(array: Array, dtype: str | None = None) -> InlineTensor:
    """Return a handle that carries the elements of `array` itself. Raises TransportError for a type it cannot send."""
    name = name_of(array, dtype)
    data = array.astype(storage(name), copy=False).tobytes()  # in C order whatever the strides are
    return InlineTensor(dtype=name, shape=array.shape, data=data)


def inline_array(ref: InlineTensor) -> Array:
    """Return the elements of an inline tensor, read only. Raises TransportError when size and shape disagree."""
    check_size(ref.dtype, ref.shape, len(ref.data))
    array: Array = np.frombuffer(ref.data, dtype=storage(ref.dtype)).reshape(ref.shape)
    return array
