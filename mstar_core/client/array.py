"""Numbers of an output as a numpy array. numpy is loaded here, when an array is asked for, and nowhere else."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from mstar_core.errors import TransportError, UsageError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

BFLOAT16: Final = "bfloat16"
SAFETENSORS_DTYPES: Final[Mapping[str, str]] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": BFLOAT16,
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


def numpy() -> ModuleType:
    """The module numpy. Raises UsageError where it is not installed."""
    try:
        import numpy as found
    except ImportError as error:
        raise UsageError(
            "arrays need numpy", str(error), "pip install numpy, or read .data, .shape and .dtype"
        ) from error
    return found


def array_of(data: bytes, metadata: Mapping[str, Any]) -> Array:
    """The array that `data` holds in the form that `metadata` tells of (`format`: raw when absent).

    raw: little endian, C order, `shape` and `dtype` from metadata. npy and safetensors tell both themselves.
    bfloat16 comes as float32, which holds it exactly. Raises TransportError when the two do not fit.
    """
    match metadata.get("format") or "raw":
        case "raw":
            return _raw(data, str(metadata.get("dtype") or "float32"), metadata.get("shape"))
        case "npy" | "safetensors" | "json" as form:
            try:
                return _file(form, data, metadata)
            except (ValueError, KeyError, TypeError, EOFError, struct.error) as error:
                raise TransportError(f"the output is no {form} that can be read", str(error)) from error
        case other:
            raise TransportError(f"arrays in the form {other!r} cannot be read", hint="ask for output_format raw")


def _file(form: str, data: bytes, metadata: Mapping[str, Any]) -> Array:
    if form == "npy":
        found: Array = numpy().load(io.BytesIO(data), allow_pickle=False)
        return found
    if form == "safetensors":
        return _safetensors(data, metadata.get("name"))
    dtype = metadata.get("dtype")
    made: Array = numpy().array(json.loads(data), dtype="float32" if dtype == BFLOAT16 else dtype)
    return _shaped(made, metadata.get("shape"))


def npy_of(array: object) -> bytes:
    """An array as an npy file, to upload it. Raises ValueError for arrays of Python objects."""
    file = io.BytesIO()
    numpy().save(file, numpy().asarray(array), allow_pickle=False)
    return file.getvalue()


def _raw(data: bytes, dtype: str, shape: Any) -> Array:
    np = numpy()
    if dtype == BFLOAT16:
        flat = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        kind = np.dtype(dtype).newbyteorder("<")
        if len(data) % kind.itemsize:
            raise TransportError(f"the output has {len(data)} bytes, which are no whole numbers of the type {dtype}")
        flat = np.frombuffer(data, kind)
    return _shaped(flat, shape)


def _shaped(array: Array, shape: Any) -> Array:
    if shape is None:
        return array
    if math.prod(shape) != array.size:
        raise TransportError(f"the output has {array.size} numbers, its shape {list(shape)} has {math.prod(shape)}")
    return array.reshape(shape)


def _safetensors(data: bytes, name: Any) -> Array:
    """The tensor called `name`, or the only one. A u64 header length, a JSON header, then the bytes."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    tensors = {key: value for key, value in header.items() if key != "__metadata__"}
    chosen = tensors.get(str(name)) or (next(iter(tensors.values())) if len(tensors) == 1 else None)
    if chosen is None:
        raise TransportError(f"the file holds {', '.join(sorted(tensors)) or 'nothing'}, not {name}")
    begin, end = (8 + length + offset for offset in chosen["data_offsets"])
    return _raw(data[begin:end], SAFETENSORS_DTYPES[chosen["dtype"]], chosen["shape"])
