"""Tensors that clients upload as npy or safetensors, checked. Used by the processors; loads no torch."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import BadMedia, RequestError
from mstar_vjepa2.transforms import normalised

if TYPE_CHECKING:
    import numpy.typing as npt

    from mstar_core.plugin.processor import MediaPart
    from mstar_vjepa2.facts import EncoderFacts

    Array = npt.NDArray[Any]

FIELD: Final = "tensor"
NPY: Final = b"\x93NUMPY"
PIXELS: Final = "pixel_values"
"""How the name of a clip's tensor begins in a file that holds several."""


def read_tensor(part: MediaPart, prefix: str = "") -> Array:
    """The one tensor of an upload, or the one whose name begins with `prefix`. Raises BadMedia or RequestError.

    Floats are checked to be finite; nothing but plain numbers is ever built.
    """
    found = _npy(part.data) if part.data.startswith(NPY) else _safetensors(part.data, prefix)
    if found.dtype.kind not in "fiu" or found.size == 0:
        raise RequestError(
            f"the tensor holds {found.dtype.name} of shape {list(found.shape)}",
            hint="send floating point numbers",
            field=FIELD,
        )
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise RequestError("the tensor holds NaN or infinite numbers", hint="send finite numbers", field=FIELD)
    return found


def clip_of(part: MediaPart, encoder: EncoderFacts) -> Array:
    """Frames [F, 3, crop, crop] of an upload: floats are normalised already, uint8 is not. Raises RequestError."""
    value = read_tensor(part, PIXELS)
    if value.ndim == 5 and value.shape[0] == 1:
        value = value[0]
    wanted = (3, encoder.crop, encoder.crop)
    if value.ndim != 4 or value.shape[1:] != wanted:
        raise RequestError(
            f"the clip has shape {list(value.shape)}, allowed is [frames, 3, {encoder.crop}, {encoder.crop}]",
            "positions belong to this size",
            "send frames, channels, rows, columns",
            field=FIELD,
            value=str(list(value.shape)),
        )
    if value.dtype == np.uint8:
        return value
    if value.dtype.kind != "f":
        raise RequestError(
            f"the clip holds {value.dtype.name}", hint="send normalised floats, or pixels as uint8", field=FIELD
        )
    return as_float32(value, FIELD)


def float_clip_of(part: MediaPart, encoder: EncoderFacts) -> Array:
    """The same as normalised float32, whatever was sent."""
    value = clip_of(part, encoder)
    return normalised(value) if value.dtype == np.uint8 else value


def as_float32(value: Any, field: str) -> Array:
    """Numbers as float32. Raises RequestError naming `field` for one that is too large."""
    with np.errstate(over="ignore"):
        made = np.ascontiguousarray(value, dtype=np.float32)
    if not np.isfinite(made).all():
        raise RequestError(f"{field} holds numbers beyond float32", hint="send finite numbers", field=field)
    return made


def _npy(data: bytes) -> Array:
    try:
        found: Array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:
        raise _unreadable(error) from error
    return found


def _safetensors(data: bytes, prefix: str) -> Array:
    from safetensors.numpy import load

    try:
        found = load(data)
    except Exception as error:
        raise _unreadable(error) from error
    names = list(found) if len(found) == 1 else [name for name in found if prefix and name.startswith(prefix)]
    if len(names) != 1:
        raise RequestError(
            f"the file holds {len(found)} tensors", hint=f"send one, or name it {prefix or 'by its use'}", field=FIELD
        )
    return found[names[0]]


def _unreadable(error: Exception) -> BadMedia:
    return BadMedia("the tensor cannot be read", type(error).__name__, "send npy or safetensors", field=FIELD)
