"""How a tensor travels in a message: its bytes, or a handle to shared memory."""

from __future__ import annotations

import msgspec


class InlineTensor(msgspec.Struct, frozen=True, kw_only=True, tag="inline"):
    """A small array inside the message. data: C-order bytes; dtype: numpy name (bf16 travels as `bfloat16`)."""

    dtype: str
    shape: list[int]
    data: bytes


class ShmTensor(msgspec.Struct, frozen=True, kw_only=True, tag="shm"):
    """A handle to bytes in the owner's shared memory. A stale generation is an error, never wrong bytes."""

    dtype: str
    shape: list[int]
    owner: str
    segment: int
    offset: int
    size_bytes: int
    slot: int
    generation: int


TensorRef = InlineTensor | ShmTensor
