"""Encoding of numeric outputs as raw bytes, npy, safetensors or JSON. Used by the output encoder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

import msgspec
import numpy as np

from mstar_core.api.output.queue import Array, OutputItem
from mstar_core.codec import BFLOAT16, npy_header, safetensors_header, widen_bfloat16
from mstar_core.errors import RequestError

Form = Literal["raw", "npy", "safetensors", "json"]
FORMS: Final[tuple[str, ...]] = get_args(Form)
FLOATS: Final = ("float32", "float16", "bfloat16")

MOST_JSON: Final = 65_536
"""Largest output, in numbers, that is encoded as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberForm:
    """Number format of a request. dtype: type for floating-point outputs; None: unchanged. Integers keep their type."""

    form: Form = "raw"
    dtype: str | None = None

    @classmethod
    def of(cls, params: object) -> NumberForm:
        """Read the parameters `output_format` and `output_dtype`, if the model has them."""
        form, dtype = getattr(params, "output_format", None), getattr(params, "output_dtype", None)
        return cls(form=cast("Form", form) if form in FORMS else "raw", dtype=dtype if dtype in FLOATS else None)

    def changes(self, item: OutputItem) -> bool:
        """Return whether encoding converts the numbers or writes them as text, rather than copying them."""
        own = item.dtype or item.array.dtype.name
        is_float = item.dtype == BFLOAT16 or item.array.dtype.kind == "f"
        return self.form == "json" or (is_float and self.dtype not in (None, own))


def packed(item: OutputItem, wanted: NumberForm) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of a numeric output and its metadata: shape, dtype, name, format, and the item's own.

    Little endian, C order. Raises RequestError if the format does not support the output.
    """
    array, dtype = _converted(item, wanted.dtype)
    facts = {"shape": list(array.shape), "dtype": dtype, "name": item.port, "format": wanted.form}
    match wanted.form:
        case "raw":
            data = array.tobytes()
        case "npy":
            data = _header(wanted.form, dtype, lambda: npy_header(array.shape, dtype)) + array.tobytes()
        case "safetensors":
            notes = {str(key): note if isinstance(note, str) else json.dumps(note) for key, note in item.meta.items()}
            entry = (item.port, dtype, array.shape, array.nbytes)
            data = _header(wanted.form, dtype, lambda: safetensors_header([entry], notes)) + array.tobytes()
        case "json":
            data = _json(array, dtype, item.port)
    return data, {**item.meta, **facts}


def widened(item: OutputItem) -> Array:
    """Return an output's array; bfloat16 as float32, because NumPy has no bfloat16."""
    wide: Array = widen_bfloat16(item.array) if item.dtype == BFLOAT16 else item.array
    return wide


def _converted(item: OutputItem, wanted: str | None) -> tuple[Array, str]:
    is_half = item.dtype == BFLOAT16
    own = BFLOAT16 if is_half else item.array.dtype.name
    array = np.asarray(item.array, order="C")  # ascontiguousarray would turn a scalar into [1]
    is_float = is_half or array.dtype.kind == "f"
    if wanted is None or not is_float or wanted == own:
        return array.astype(array.dtype.newbyteorder("<"), copy=False), own
    wide = widen_bfloat16(array) if is_half else array.astype("<f4", copy=False)
    if wanted == BFLOAT16:
        return _narrowed(wide), BFLOAT16
    return wide.astype(np.dtype(wanted).newbyteorder("<"), copy=False), wanted


def _narrowed(wide: Array) -> Array:
    """Return float32 as bfloat16 bits, rounded to nearest, ties to even. NaN stays NaN."""
    bits = np.asarray(wide, order="C").view("<u4")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    made: Array = np.where(np.isnan(wide), np.uint16(0x7FC0), rounded).astype("<u2")
    return made


def _header(form: Form, dtype: str, make: Callable[[], bytes]) -> bytes:
    try:
        return make()
    except ValueError as error:
        raise RequestError(
            f"{form} does not support {dtype}", hint="use output_format raw, or another output_dtype",
            field="output_format", value=form, allowed="raw, safetensors" if dtype == BFLOAT16 else "raw",
        ) from error  # fmt: skip


def _json(array: Array, dtype: str, port: str) -> bytes:
    if math.prod(array.shape) > MOST_JSON:
        raise RequestError(
            f"{port} has {math.prod(array.shape)} numbers, but JSON output is limited to {MOST_JSON}",
            hint="use output_format raw, npy or safetensors", field="output_format", value="json",
            allowed="raw, npy, safetensors",
        )  # fmt: skip
    return msgspec.json.encode((widen_bfloat16(array) if dtype == BFLOAT16 else array).tolist())
