"""Validation of tensors that clients upload as npy or safetensors. Used by the processors; imports no torch."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.codec import NPY_MAGIC
from mstar_core.errors import BadMedia, RequestError
from mstar_vjepa2.request.transforms import normalised

if TYPE_CHECKING:
    import numpy.typing as npt

    from mstar_core.plugin.processor import MediaPart
    from mstar_vjepa2.checkpoint.config import EncoderConfig

    Array = npt.NDArray[Any]

FIELD: Final = "tensor"
NPY_VERSIONS: Final = ((1, 0), (2, 0), (3, 0))
"""npy versions that numpy writes. Version 3 differs from 2 only in field names, which pixels do not have."""

MOST_HEAD: Final = 16 << 10
"""Bytes of an npy file that must contain its header; numpy itself allows 10,000 characters."""

PIXELS: Final = "pixel_values"
"""Name prefix of a clip's tensor in a file with several tensors."""


def read_tensor(part: MediaPart, prefix: str = "") -> Array:
    """Return the only tensor of an upload, or the one whose name starts with `prefix`. Raises BadMedia or RequestError.

    Floats must be finite. Only plain numbers are deserialised.
    """
    array = _npy(part.data) if part.data.startswith(NPY_MAGIC) else _safetensors(part.data, prefix)
    if array.dtype.kind not in "fiu" or array.size == 0:
        raise RequestError(
            f"the tensor contains {array.dtype.name} of shape {list(array.shape)}",
            hint="send floating point numbers",
            field=FIELD,
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RequestError("the tensor contains NaN or infinite numbers", hint="send finite numbers", field=FIELD)
    return array


def clip_of(part: MediaPart, encoder: EncoderConfig) -> Array:
    """Return the frames [F, 3, crop, crop] of an upload: uint8, or normalised floats. Raises RequestError."""
    value = read_tensor(part, PIXELS)
    if value.ndim == 5 and value.shape[0] == 1:
        value = value[0]
    expected = (3, encoder.crop, encoder.crop)
    if value.ndim != 4 or value.shape[1:] != expected:
        raise RequestError(
            f"the clip has shape {list(value.shape)}, allowed is [frames, 3, {encoder.crop}, {encoder.crop}]",
            "the checkpoint has positions for this size",
            "send [frames, channels, rows, columns]",
            field=FIELD,
            value=str(list(value.shape)),
        )
    if value.dtype == np.uint8:
        return value
    if value.dtype.kind != "f":
        raise RequestError(
            f"the clip contains {value.dtype.name}", hint="send normalised floats, or pixels as uint8", field=FIELD
        )
    return as_float32(value, FIELD)


def float_clip_of(part: MediaPart, encoder: EncoderConfig) -> Array:
    """Return the frames of an upload as normalised float32."""
    value = clip_of(part, encoder)
    return normalised(value) if value.dtype == np.uint8 else value


def as_float32(value: Any, field: str) -> Array:
    """Convert numbers to float32. Raises RequestError naming `field` for one that is out of range."""
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(value, dtype=np.float32)
    if not np.isfinite(values).all():
        raise RequestError(
            f"{field} contains numbers beyond the range of float32", hint="send finite numbers", field=field
        )
    return values


def is_plain_clip(part: MediaPart, encoder: EncoderConfig) -> bool:
    """Whether an upload is pixels in the encoder's format, by its unverified header."""
    if not part.data.startswith(NPY_MAGIC):
        return False
    try:
        head = _npy_head(part.data)
    except Exception:  # noqa: BLE001  whatever is wrong with it, reading it says
        return False
    expected = (3, encoder.crop, encoder.crop)
    return head.dtype == np.uint8 and not head.is_columns and head.shape[-3:] == expected


@dataclass(frozen=True, slots=True)
class _Head:
    """Header of an npy file. is_columns: Fortran order. start: offset of the data."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_columns: bool
    start: int


def _npy_head(data: bytes) -> _Head:
    file = io.BytesIO(data[:MOST_HEAD])
    version = np.lib.format.read_magic(file)
    if version not in NPY_VERSIONS:
        raise ValueError(f"version {version} of npy is not known")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_columns, dtype = read(file)
    if any(size < 0 for size in shape):  # reshape would infer a size
        raise ValueError(f"shape {list(shape)} has a negative size")
    return _Head(dtype, shape, is_columns, file.tell())


def _npy(data: bytes) -> Array:
    """Return the array of an npy file as a view of its bytes, because clips are megabytes."""
    try:
        head = _npy_head(data)
        if head.dtype.hasobject:
            raise ValueError("objects are not read")
        flat: Array = np.frombuffer(data, dtype=head.dtype, count=math.prod(head.shape), offset=head.start)
        return flat.reshape(head.shape, order="F" if head.is_columns else "C")
    except Exception as error:
        raise _unreadable(error) from error


def _safetensors(data: bytes, prefix: str) -> Array:
    from safetensors.numpy import load

    try:
        tensors = load(data)
    except Exception as error:
        raise _unreadable(error) from error
    names = list(tensors) if len(tensors) == 1 else [name for name in tensors if prefix and name.startswith(prefix)]
    if len(names) != 1:
        raise RequestError(
            f"the file contains {len(tensors)} tensors",
            hint=f"send one, or name it {prefix or 'by its use'}",
            field=FIELD,
        )
    return tensors[names[0]]


def _unreadable(error: Exception) -> BadMedia:
    return BadMedia("the tensor cannot be read", type(error).__name__, "send npy or safetensors", field=FIELD)
