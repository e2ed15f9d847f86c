"""Numeric outputs as NumPy arrays. NumPy is imported here, when an array is requested, and nowhere else."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mstar_core.codec import BFLOAT16, RawArray, read_npy, read_safetensors, widen_bfloat16
from mstar_core.errors import TransportError, UsageError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]


def numpy() -> ModuleType:
    """Import NumPy. Raises UsageError if it is not installed."""
    try:
        import numpy as found
    except ImportError as error:
        raise UsageError(
            "arrays need numpy", str(error), "pip install numpy, or read .data, .shape and .dtype"
        ) from error
    return found


def array_of(data: bytes, metadata: Mapping[str, Any]) -> Array:
    """Decode an output of the `format` in its metadata (default: raw).

    raw: little endian, C order, with `shape` and `dtype` of the metadata; npy and safetensors contain both. bfloat16
    becomes float32, which represents it exactly. Raises TransportError if data and metadata disagree.
    """
    form = metadata.get("format") or "raw"
    dtype, shape = str(metadata.get("dtype") or "float32"), metadata.get("shape")
    try:
        match form:
            case "raw":
                return _shaped(_flat(data, dtype), shape)
            case "npy":
                return _array(read_npy(data))
            case "safetensors":
                return _array(_chosen(read_safetensors(data), str(metadata.get("name"))))
            case "json":
                array: Array = numpy().array(json.loads(data), dtype="float32" if dtype == BFLOAT16 else dtype)
                return _shaped(array, shape)
            case _:
                raise TransportError(f"arrays in the form {form!r} cannot be read", hint="use output_format raw")
    except (ValueError, TypeError) as error:
        raise TransportError(f"the {form} output cannot be read", str(error)) from error


def npy_of(array: object) -> bytes:
    """Encode an array as a .npy file, to upload it. Raises ValueError for arrays of Python objects."""
    file = io.BytesIO()
    numpy().save(file, numpy().asarray(array), allow_pickle=False)
    return file.getvalue()


def _array(raw: RawArray) -> Array:
    return _shaped(_flat(raw.data, raw.dtype), raw.shape)


def _flat(data: bytes | memoryview, dtype: str) -> Array:
    np = numpy()
    kind = np.dtype("<u2" if dtype == BFLOAT16 else dtype).newbyteorder("<")
    if len(data) % kind.itemsize:
        raise TransportError(f"the output has {len(data)} bytes, which is not a multiple of the size of {dtype}")
    flat: Array = np.frombuffer(data, kind)
    return widen_bfloat16(flat) if dtype == BFLOAT16 else flat


def _shaped(array: Array, shape: Any) -> Array:
    if shape is None:
        return array
    if math.prod(shape) != array.size:
        raise TransportError(f"the output has {array.size} numbers, its shape {list(shape)} has {math.prod(shape)}")
    return array.reshape(shape)


def _chosen(tensors: Mapping[str, RawArray], name: str) -> RawArray:
    """Return the tensor called `name`, or the only one. Raises TransportError."""
    tensor = tensors.get(name) or (next(iter(tensors.values())) if len(tensors) == 1 else None)
    if tensor is None:
        raise TransportError(f"the file contains {', '.join(sorted(tensors)) or 'no tensor'}, not {name}")
    return tensor
