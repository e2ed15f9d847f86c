"""Messages of openpi's robot protocol: msgpack with numpy arrays. Used by the api and by processors.

An array is a map with byte keys: `__ndarray__`, `data` (C order), `dtype` (numpy's short text), `shape`; a numpy scalar
is `__npgeneric__`, `data`, `dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from mstar_core.errors import RequestError

ARRAY: Final = b"__ndarray__"
SCALAR: Final = b"__npgeneric__"
KINDS: Final = "biufSU"
"""Allowed dtype kinds: booleans, integers, floats, texts. Objects, records and complex numbers are refused."""

MOST_AXES: Final = 8
FIELD: Final = "observation"

T = TypeVar("T", str, bytes)

_FEW: Final = 0x80
"""Upper half of the first byte of a map of up to 15 entries. Source: the msgpack specification."""

_MAP: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_ARRAY: Final = msgspec.msgpack.Decoder(dict[bytes, msgspec.Raw])
_LEVELS: Final = msgspec.msgpack.encode("|u1")
_BYTES: Final = (b"\xc4", b"\xc5", b"\xc6")
"""First bytes of msgpack byte strings."""


def packed(value: Any) -> bytes:
    """Encode one message. Raises RequestError for an array of a kind that the protocol does not allow."""
    return msgspec.msgpack.encode(_plain(value))


def unpacked(data: bytes) -> Any:
    """Decode a message; arrays are read-only. Raises RequestError naming the invalid part."""
    try:
        value = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            "the message must be msgpack", str(error), "encode it as openpi does", field=FIELD
        ) from error
    return _numpy(value, FIELD)


def besides_pictures(data: bytes, shape: Sequence[int]) -> int:
    """Count the bytes of a message outside uint8 arrays of `shape`, without reading the arrays.

    Returns all bytes for a message that is not a map.
    """
    return len(data) - _picture_bytes(memoryview(data), msgspec.msgpack.encode(list(shape)), depth=2)


def _picture_bytes(data: memoryview, shape: bytes, depth: int) -> int:
    entries = _entries(data, _MAP)
    if entries:
        return sum(_picture_bytes(value, shape, depth - 1) for value in entries.values()) if depth else 0
    array = _entries(data, _ARRAY)
    if b"data" not in array or bytes(array.get(b"dtype", b"")) != _LEVELS or bytes(array.get(b"shape", b"")) != shape:
        return 0
    return len(array[b"data"]) if bytes(array[b"data"][:1]) in _BYTES else 0


def _entries(data: memoryview, decoder: msgspec.msgpack.Decoder[dict[T, msgspec.Raw]]) -> dict[T, memoryview]:
    """Return the raw entries of a map of at most 15 entries, empty for anything else."""
    if not data or data[0] & 0xF0 != _FEW:
        return {}
    try:
        return {name: memoryview(value) for name, value in decoder.decode(data).items()}
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        _check_kind(value.dtype, FIELD)
        return {ARRAY: True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": list(value.shape)}
    if isinstance(value, np.generic):
        _check_kind(value.dtype, FIELD)
        return {SCALAR: True, b"data": value.tobytes(), b"dtype": value.dtype.str}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _numpy(value: Any, place: str) -> Any:
    if isinstance(value, list):
        return [_numpy(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if ARRAY in value:
        return _array(value, place, value.get(b"shape"))
    if SCALAR in value:
        return _array(value, place, [])[()]
    return {key: _numpy(item, f"{place}/{_shown(key)}") for key, item in value.items()}


def _array(value: Mapping[Any, Any], place: str, shape: Any) -> np.ndarray:
    data, dtype = value.get(b"data"), _dtype(value.get(b"dtype"), place)
    sizes = shape if isinstance(shape, list) else None
    if sizes is None or len(sizes) > MOST_AXES or not all(type(size) is int and size >= 0 for size in sizes):
        raise _bad(place, f"its shape is {shape!r}", f"up to {MOST_AXES} whole numbers")
    if not isinstance(data, bytes) or len(data) != math.prod(sizes) * dtype.itemsize:
        have = len(data) if isinstance(data, bytes) else "no"
        raise _bad(place, f"{have} bytes for shape {sizes} of {dtype.str}", "send all of its bytes in row order")
    try:
        return np.frombuffer(data, dtype=dtype).reshape(sizes)
    except (ValueError, OverflowError) as error:  # an axis of no values beside one that is too long for NumPy
        raise _bad(place, f"its shape is {sizes}", "a shape of the values that were sent") from error


def _dtype(text: Any, place: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(text if isinstance(text, str) else text.decode("ascii"))
    except (TypeError, ValueError, AttributeError, SyntaxError) as error:
        raise _bad(place, f"its dtype is {text!r}", "numpy's short text, such as <f4") from error
    _check_kind(dtype, place)
    if not dtype.itemsize:
        raise _bad(place, f"its dtype is {text!r}", "a dtype of some bytes")
    return dtype


def _check_kind(dtype: np.dtype[Any], place: str) -> None:
    if dtype.kind not in KINDS or dtype.fields is not None or dtype.subdtype is not None:
        raise _bad(place, f"its dtype is {dtype.str}", "send numbers, booleans or texts")


def _shown(key: Any) -> str:
    return str(key)[:40]


def _bad(place: str, detail: str, hint: str) -> RequestError:
    return RequestError(f"{place} is not a valid array", detail, hint, field=place)
