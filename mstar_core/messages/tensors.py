"""Handles of tensors in messages. Created and resolved by the tensor transports.

`dtype` is a name of `mstar_core.transport.dtypes`; elements are in C order, little endian.
"""

from __future__ import annotations

import msgspec


class InlineTensor(msgspec.Struct, frozen=True, kw_only=True, tag="inline"):
    """A small tensor whose bytes are part of the message. It needs no release."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class ShmTensor(msgspec.Struct, frozen=True, kw_only=True, tag="shm"):
    """A tensor in the shared memory of `owner`, lent to one reader until that reader sends TensorFreed.

    owner: mailbox name of the writing process. offset, size_bytes: position of the elements in the owner's arena.
    slot: index into the arena's slot table, which contains `generation` during the loan. A generation is never reused
    and has the owner's incarnation in its upper bits, so that stale handles are detected.
    """

    dtype: str
    shape: tuple[int, ...]
    owner: str
    offset: int
    size_bytes: int
    slot: int
    generation: int


class _PeerTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in memory of `owner` that another worker copies from, until that sends TensorFreed. Base of two forms.

    memory: handle of a segment that the owner exports. offset, size_bytes: position in the segment. slot, generation:
    of the loan, as those of ShmTensor; slots begin at 2 ** 20.
    """

    dtype: str
    shape: tuple[int, ...]
    owner: str
    memory: bytes
    offset: int
    size_bytes: int
    slot: int
    generation: int


class CudaTensor(_PeerTensor, frozen=True, kw_only=True, tag="cuda"):
    """A tensor in GPU memory, for a worker of the same host. memory: CUDA IPC handle."""


class RemoteTensor(_PeerTensor, frozen=True, kw_only=True, tag="remote"):
    """A tensor in host memory that the transfer engine exports by TCP or RDMA.

    memory: `HOST:PORT ADDRESS` in ASCII, the engine's handshake address and the segment's address in its process.
    """


PeerTensor = CudaTensor | RemoteTensor
"""Forms that a worker copies from memory of another one."""

TensorRef = InlineTensor | ShmTensor | PeerTensor
