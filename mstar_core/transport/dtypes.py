"""Element types of tensor handles and their numpy storage. Used by every tensor transport."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from mstar_core.codec import BFLOAT16, DTYPES
from mstar_core.errors import TransportError, did_you_mean

Array = npt.NDArray[np.generic]

# numpy lacks bfloat16: its bits travel as uint16, and a reader with torch views them as bfloat16.
STORAGE: dict[str, np.dtype[np.generic]] = {
    name: np.dtype("uint16" if name == BFLOAT16 else name).newbyteorder("<") for name in DTYPES
}

_NAMES = {stored: name for name, stored in STORAGE.items() if name != BFLOAT16}  # a numpy lookup costs a microsecond


def storage(name: str) -> np.dtype[np.generic]:
    """Return the numpy storage of the element type `name`. Raises TransportError for unknown names."""
    try:
        return STORAGE[name]
    except KeyError:
        raise TransportError(f"tensors of type {name!r} cannot be sent", hint=did_you_mean(name, STORAGE)) from None


def name_of(array: Array, dtype: str | None) -> str:
    """Return the handle's type name for `array`. dtype: the true name if numpy lacks the type (bfloat16 as uint16).

    Raises TransportError when the type cannot be sent or `dtype` is not stored the way the array is.
    """
    stored = array.dtype if array.dtype in _NAMES else array.dtype.newbyteorder("<")
    name = dtype or _NAMES.get(stored) or array.dtype.name
    if storage(name) != stored:
        raise TransportError(
            f"an array of {array.dtype.name} is not {name}", f"{name} is stored as {storage(name).name}"
        )
    return name


def check_size(name: str, shape: tuple[int, ...], size_bytes: int) -> None:
    """Raise TransportError unless `size_bytes` is the size of a tensor of this type and shape."""
    if min(shape, default=0) < 0 or math.prod(shape) * storage(name).itemsize != size_bytes:
        raise TransportError("a tensor handle contradicts itself", f"{name}{list(shape)} in {size_bytes} bytes")
