"""Handles of tensors: loans, and small tensors inside a message. Used by the transport, worker and api."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mstar_core.messages.tensors import InlineTensor, TensorRef
from mstar_core.transport.dtypes import Array, check_size, name_of, storage


class Loan(NamedTuple):
    """Loan of a tensor; the reader returns it to `owner` after use."""

    owner: str
    slot: int
    generation: int


def loan_of(ref: TensorRef) -> Loan | None:
    """Return the loan of `ref`, or None for an inline tensor."""
    return None if isinstance(ref, InlineTensor) else Loan(ref.owner, ref.slot, ref.generation)


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
