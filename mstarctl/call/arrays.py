"""Arrays as files, without NumPy: the .npy form both ways, and JSON. Little endian, C order."""

from __future__ import annotations

import ast
import math
import struct
from collections.abc import Sequence
from typing import Any, Final

from mstar_core.errors import ConfigError

DESCRIPTIONS: Final = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4", "int16": "<i2",
    "int8": "|i1", "uint8": "|u1", "bool": "|b1",
}  # fmt: skip
FORMATS: Final = {
    "<f8": "d", "<f4": "f", "<f2": "e", "<i8": "q", "<i4": "i", "<i2": "h", "|i1": "b", "|u1": "B", "|b1": "?",
}  # fmt: skip
MAGIC: Final = b"\x93NUMPY"
ALIGNMENT: Final = 64


def npy(data: bytes, shape: Sequence[int], dtype: str) -> bytes:
    """A .npy file, version 1.0. Raises ConfigError for a dtype that the form does not have (bfloat16)."""
    description = _described(dtype)
    sides = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    header = f"{{'descr': '{description}', 'fortran_order': False, 'shape': ({sides}), }}"
    header += " " * (-(len(MAGIC) + 4 + len(header) + 1) % ALIGNMENT) + "\n"
    return MAGIC + b"\x01\x00" + struct.pack("<H", len(header)) + header.encode("latin-1") + data


def nested(data: bytes, shape: Sequence[int], dtype: str) -> Any:
    """The numbers as nested lists."""
    description = _described(dtype)
    count = math.prod(shape)
    return _shaped(list(struct.unpack(f"<{count}{FORMATS[description]}", data)), list(shape))


def read_npy(data: bytes) -> Any:
    """The numbers of a .npy file as nested lists. Raises ValueError for what is none, or holds no plain numbers."""
    try:
        if data[6:7] == b"\x01":
            size, start = struct.unpack_from("<H", data, 8)[0], 10
        else:
            size, start = struct.unpack_from("<I", data, 8)[0], 12
        facts = ast.literal_eval(data[start : start + size].decode("latin-1"))
        description, shape = facts["descr"], [int(side) for side in facts["shape"]]
        if description not in FORMATS or facts["fortran_order"]:
            raise ValueError(f"a NumPy file of {description!r} is not read; save it as float32 in C order")
        values = struct.unpack_from(f"<{math.prod(shape)}{FORMATS[description]}", data, start + size)
    except (struct.error, KeyError, TypeError, SyntaxError) as error:
        raise ValueError(f"a NumPy file that is cut or damaged: {error}") from error
    return _shaped(list(values), shape)


def _described(dtype: str) -> str:
    if dtype not in DESCRIPTIONS:
        raise ConfigError(f"{dtype} cannot be written so", hint="write raw bytes: --out FILE.bin", key="out")
    return DESCRIPTIONS[dtype]


def _shaped(values: list[Any], shape: list[int]) -> Any:
    if not shape:
        return values[0]
    if len(shape) == 1:
        return values
    step = math.prod(shape[1:])
    return [_shaped(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]
