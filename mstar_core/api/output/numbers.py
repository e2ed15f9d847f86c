"""Numbers of an output in the form that a request asks for: raw, npy, safetensors or JSON. Used by the presenter."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

import msgspec
import numpy as np

from mstar_core.api.output.queue import Array, OutputItem
from mstar_core.errors import RequestError

Form = Literal["raw", "npy", "safetensors", "json"]
FORMS: Final[tuple[str, ...]] = get_args(Form)
FLOATS: Final = ("float32", "float16", "bfloat16")
BFLOAT16: Final = "bfloat16"

MOST_JSON: Final = 65_536
"""Numbers of an output that is written as text."""

SAFETENSORS: Final[Mapping[str, str]] = {
    "float64": "F64", "float32": "F32", "float16": "F16", BFLOAT16: "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberForm:
    """How a request wants its numbers. dtype: type of those that are no whole numbers; None: as they were made."""

    form: Form = "raw"
    dtype: str | None = None

    @classmethod
    def of(cls, params: object) -> NumberForm:
        """Read the parameters `output_format` and `output_dtype` of a model that has them."""
        form, dtype = getattr(params, "output_format", None), getattr(params, "output_dtype", None)
        return cls(form=cast("Form", form) if form in FORMS else "raw", dtype=dtype if dtype in FLOATS else None)

    def changes(self, item: OutputItem) -> bool:
        """Whether an output's numbers become others, or text: more than a copy."""
        own = item.dtype or item.array.dtype.name
        is_float = item.dtype == BFLOAT16 or item.array.dtype.kind == "f"
        return self.form == "json" or (is_float and self.dtype not in (None, own))


def packed(item: OutputItem, wanted: NumberForm) -> tuple[bytes, dict[str, Any]]:
    """The bytes of an output of numbers, and what tells of them: name, shape, dtype, format, and what came with it.

    Little endian, C order. Raises RequestError where the form cannot hold them.
    """
    array, dtype = _converted(item, wanted.dtype)
    facts = {"shape": list(array.shape), "dtype": dtype, "name": item.port, "format": wanted.form}
    match wanted.form:
        case "raw":
            data = array.tobytes()
        case "npy":
            data = _npy(array, dtype)
        case "safetensors":
            data = _safetensors(array, dtype, item)
        case "json":
            data = _json(array, dtype, item.port)
    return data, {**item.meta, **facts}


def widened(item: OutputItem) -> Array:
    """An output's array; bfloat16, which numpy does not know, as float32, which holds it exactly."""
    return widened_bits(item.array) if item.dtype == BFLOAT16 else item.array


def _converted(item: OutputItem, wanted: str | None) -> tuple[Array, str]:
    is_half = item.dtype == BFLOAT16
    own = BFLOAT16 if is_half else item.array.dtype.name
    array = np.asarray(item.array, order="C")  # ascontiguousarray would make [1] of a single number
    is_float = is_half or array.dtype.kind == "f"
    if wanted is None or not is_float or wanted == own:
        return array.astype(array.dtype.newbyteorder("<"), copy=False), own
    wide = widened_bits(array) if is_half else array.astype("<f4", copy=False)
    if wanted == BFLOAT16:
        return _halved(wide), BFLOAT16
    return wide.astype(np.dtype(wanted).newbyteorder("<"), copy=False), wanted


def widened_bits(bits: Array) -> Array:
    """bfloat16 as numpy holds it, uint16, to float32."""
    wide: Array = (bits.astype("<u4") << 16).view("<f4")
    return wide


def _halved(wide: Array) -> Array:
    """float32 to the bits of bfloat16, rounded to the nearest, ties to even. A NaN stays one."""
    bits = np.asarray(wide, order="C").view("<u4")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    made: Array = np.where(np.isnan(wide), np.uint16(0x7FC0), rounded).astype("<u2")
    return made


def _npy(array: Array, dtype: str) -> bytes:
    if dtype == BFLOAT16:
        raise RequestError(
            "npy holds no bfloat16", hint="ask for safetensors or raw, or for output_dtype float32",
            field="output_format", value="npy", allowed="raw, safetensors",
        )  # fmt: skip
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def _safetensors(array: Array, dtype: str, item: OutputItem) -> bytes:
    """One tensor under the name of its port; what came with it stands as strings in the metadata."""
    if dtype not in SAFETENSORS:
        raise RequestError(
            f"safetensors holds no {dtype}", hint="ask for raw", field="output_format", value="safetensors",
            allowed="raw",
        )  # fmt: skip
    entry = {"dtype": SAFETENSORS[dtype], "shape": list(array.shape), "data_offsets": [0, array.nbytes]}
    notes = {str(name): value if isinstance(value, str) else json.dumps(value) for name, value in item.meta.items()}
    header = msgspec.json.encode({"__metadata__": notes, item.port: entry} if notes else {item.port: entry})
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + array.tobytes()


def _json(array: Array, dtype: str, port: str) -> bytes:
    if math.prod(array.shape) > MOST_JSON:
        raise RequestError(
            f"{port} has {math.prod(array.shape)} numbers, JSON holds at most {MOST_JSON}",
            hint="ask for output_format raw, npy or safetensors", field="output_format", value="json",
            allowed="raw, npy, safetensors",
        )  # fmt: skip
    return msgspec.json.encode((widened_bits(array) if dtype == BFLOAT16 else array).tolist())
