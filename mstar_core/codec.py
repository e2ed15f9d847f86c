"""File formats of numbers: raw, npy and safetensors, and WAV headers. Standard library only, little endian, C order.

Shared by the api (encodes outputs), the Python client (decodes them) and mstarctl (reads and writes files).
"""

from __future__ import annotations

import ast
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

BFLOAT16: Final = "bfloat16"
NPY_MAGIC: Final = b"\x93NUMPY"
NPY_ALIGNMENT: Final = 64
NPY_GROWTH: Final = 21
"""Characters that NumPy reserves for the first dimension, so that files can be appended to in place."""

SAFETENSORS_ALIGNMENT: Final = 8


class DtypeCodes(NamedTuple):
    """Codes of one dtype by format; empty if the format does not support it. struct: character of a value."""

    safetensors: str
    npy: str = ""
    struct: str = ""


DTYPES: Final[Mapping[str, DtypeCodes]] = {
    "float64": DtypeCodes("F64", "<f8", "d"),
    "float32": DtypeCodes("F32", "<f4", "f"),
    "float16": DtypeCodes("F16", "<f2", "e"),
    BFLOAT16: DtypeCodes("BF16"),
    "int64": DtypeCodes("I64", "<i8", "q"),
    "int32": DtypeCodes("I32", "<i4", "i"),
    "int16": DtypeCodes("I16", "<i2", "h"),
    "int8": DtypeCodes("I8", "|i1", "b"),
    "uint64": DtypeCodes("U64", "<u8", "Q"),
    "uint32": DtypeCodes("U32", "<u4", "I"),
    "uint16": DtypeCodes("U16", "<u2", "H"),
    "uint8": DtypeCodes("U8", "|u1", "B"),
    "bool": DtypeCodes("BOOL", "|b1", "?"),
    "complex64": DtypeCodes("", "<c8"),
}
"""Codes by dtype name. Source: the specifications of npy and safetensors, and the `struct` module."""

_BY_NPY: Final = {codes.npy: name for name, codes in DTYPES.items() if codes.npy}
_BY_SAFETENSORS: Final = {codes.safetensors: name for name, codes in DTYPES.items() if codes.safetensors}


@dataclass(frozen=True, slots=True)
class RawArray:
    """Numbers of an array: bytes, shape and dtype name."""

    data: bytes | memoryview
    shape: tuple[int, ...]
    dtype: str

    def to_lists(self) -> Any:
        """Return the numbers as nested lists. Raises ValueError for bfloat16 or if data and shape differ in size."""
        code = _code(self.dtype, "struct")
        try:
            values = struct.unpack(f"<{math.prod(self.shape)}{code}", self.data)
        except struct.error as error:
            raise ValueError(f"the data does not match the shape {list(self.shape)}: {error}") from error
        return _nested(list(values), self.shape)


def npy_header(shape: Sequence[int], dtype: str) -> bytes:
    """Return the header of a .npy file, version 1.0, as NumPy writes it. Raises ValueError for bfloat16."""
    shape = tuple(int(side) for side in shape)
    header = f"{{'descr': {_code(dtype, 'npy')!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    header += " " * (NPY_GROWTH - len(str(shape[0])) if shape else 0)
    header += " " * (-(len(NPY_MAGIC) + 4 + len(header) + 1) % NPY_ALIGNMENT) + "\n"
    return NPY_MAGIC + b"\x01\x00" + struct.pack("<H", len(header)) + header.encode("latin-1")


def read_npy(data: bytes) -> RawArray:
    """Read a .npy file. Raises ValueError if it is damaged, big endian, in Fortran order, or not numeric."""
    try:
        size, start = (
            (struct.unpack_from("<H", data, 8)[0], 10)
            if data[6:7] == b"\x01"
            else (struct.unpack_from("<I", data, 8)[0], 12)
        )
        facts = ast.literal_eval(data[start : start + size].decode("latin-1"))
        description, shape = facts["descr"], tuple(int(side) for side in facts["shape"])
        if description not in _BY_NPY or facts["fortran_order"]:
            raise ValueError(f"a NumPy file of {description!r} is not supported; save it as float32 in C order")
        begin, size = start + size, math.prod(shape) * int(description[2:])
    except (struct.error, KeyError, TypeError, SyntaxError) as error:
        raise ValueError(f"the NumPy file is truncated or damaged: {error}") from error
    if len(data) < begin + size:
        raise ValueError(f"the NumPy file is truncated: {begin + size} bytes expected, {len(data)} found")
    return RawArray(memoryview(data)[begin : begin + size], shape, _BY_NPY[description])


def safetensors_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a safetensors file, length included; the tensors' data follows it in the same order.

    tensors: (name, dtype, shape, size in bytes). Raises ValueError for a dtype that the format does not support.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, size in tensors:
        start, end = end, end + size
        header[name] = {"dtype": _code(dtype, "safetensors"), "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % SAFETENSORS_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_safetensors(data: bytes) -> dict[str, RawArray]:
    """Return the tensors of a safetensors file by name. Raises ValueError if the file is damaged."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = (8 + length + int(offset) for offset in entry["data_offsets"])
                shape = tuple(int(side) for side in entry["shape"])
                found[name] = RawArray(memoryview(data)[start:end], shape, _BY_SAFETENSORS[entry["dtype"]])
    except (struct.error, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the safetensors file is damaged: {error}") from error
    return found


SAMPLE_BYTES: Final = 2
WAV_HEADER_BYTES: Final = 44
_UNKNOWN_SIZE: Final = 0xFFFFFFFF


def wav_header(rate: int, channels: int, size_bytes: int | None) -> bytes:
    """Return the 44 bytes before PCM16 samples. size_bytes: of the samples; None if unknown, as in a stream."""
    data = _UNKNOWN_SIZE if size_bytes is None else size_bytes
    riff = _UNKNOWN_SIZE if size_bytes is None else size_bytes + WAV_HEADER_BYTES - 8
    block = channels * SAMPLE_BYTES
    form = (16, 1, channels, rate, rate * block, block, 8 * SAMPLE_BYTES)
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", riff, b"WAVE", b"fmt ", *form, b"data", data)


def widen_bfloat16(bits: Any) -> Any:
    """Return a NumPy array of bfloat16 bits (uint16) as float32, which represents every value exactly."""
    return (bits.astype("<u4") << 16).view("<f4")


def _code(dtype: str, form: str) -> str:
    codes = DTYPES.get(dtype)
    code: str = getattr(codes, form) if codes is not None else ""
    if not code:
        raise ValueError(f"{dtype} is not supported by this format")
    return code


def _nested(values: list[Any], shape: Sequence[int]) -> Any:
    if not shape:
        return values[0]
    if len(shape) == 1:
        return values
    step = math.prod(shape[1:])
    return [_nested(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]
