"""The small handle that stands for a tensor in a message. Made and read by the tensor transports alone.

`dtype` is a name of `mstar_core.transport.dtypes`; elements are in C order, little endian.
"""

from __future__ import annotations

import msgspec


class InlineTensor(msgspec.Struct, frozen=True, kw_only=True, tag="inline"):
    """A small tensor: its bytes travel in the message, and nothing has to be released."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class ShmTensor(msgspec.Struct, frozen=True, kw_only=True, tag="shm"):
    """A tensor in the shared memory of `owner`, lent to one reader until that reader says it is freed.

    owner: mailbox name of the process that wrote it. offset, size_bytes: where the elements lie in the owner's arena.
    slot: index into the arena's slot table, which holds `generation` for as long as the loan lasts; a generation is
    never used twice and names the owner's incarnation in its upper bits, so a stale handle cannot pass for a new one.
    """

    dtype: str
    shape: tuple[int, ...]
    owner: str
    offset: int
    size_bytes: int
    slot: int
    generation: int


TensorRef = InlineTensor | ShmTensor
