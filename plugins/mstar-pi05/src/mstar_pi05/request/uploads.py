"""Uploads of a request: camera images as files or arrays, state and noise as arrays. Used by the processor.

The shape of an array determines its use: [h, w, 3] or [3, h, w] is a camera, [n] the state, [n, 32] the
noise.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.codec import NPY_MAGIC, npy_header
from mstar_core.errors import BadMedia, RequestError
from mstar_pi05.checkpoint.config import ACTION_WIDTH, CAMERAS
from mstar_pi05.request.images import FIELD, Floats, Pixels, decoded, from_array

if TYPE_CHECKING:
    from mstar_core.plugin.processor import MediaPart
    from mstar_pi05.params import Params

MOST_FILES: Final = len(CAMERAS) + 2
"""Maximum files: cameras, state and noise."""

CAMERA_AXES: Final = 3
SMALL_BYTES: Final = 16 << 10
PLAIN: Final = NPY_MAGIC + b"\x01\x00"
PLAIN_BYTES: Final = 10
HEAD_BYTES: Final = 256
"""npy version 1: its magic, the bytes before its header including the header's length, and the maximum
header of a camera.

Source: numpy.lib.format.
"""

Head = tuple[tuple[int, ...], bool, np.dtype[Any]]

AXES: Final = f"a camera [h, w, 3] or [3, h, w], the state [n], or noise [n, {ACTION_WIDTH}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploads:
    """Files of a request by use. cameras: in upload order, not yet decoded."""

    cameras: tuple[MediaPart | np.ndarray, ...] = ()
    state: np.ndarray | None = None
    noise: np.ndarray | None = None

    def camera(self, number: int) -> Pixels | Floats:
        """Return the pixels of a camera: uint8, or float32 in [-1, 1], [h, w, 3]. Raises BadMedia, RequestError."""
        camera = self.cameras[number]
        if isinstance(camera, np.ndarray):
            return from_array(camera, f"camera image {number}", FIELD)
        return decoded(camera.data, number)

    def joined(self, params: Params) -> Params:
        """Return the parameters with the uploaded state and noise. Raises RequestError if one is also a parameter."""
        if self.state is not None:
            _once("robot_state", params.robot_state)
            params = replace(params, robot_state=tuple(_finite(self.state, "robot_state").tolist()))
        if self.noise is not None:
            _once("noise", params.noise)
            params = replace(params, noise=tuple(map(tuple, _finite(self.noise, "noise").tolist())))
        return params


def are_quick(media: Sequence[MediaPart], side: int) -> bool:
    """Whether all files are npy arrays, each small or a camera image of the model's size."""
    return len(media) <= MOST_FILES and all(_is_inline(part.data, side) for part in media)


def image_files(media: Sequence[MediaPart]) -> list[int]:
    """Return the indices of the image files, or none if a camera may be an array. Never raises."""
    if any(part.modality == "tensor" and not _is_no_camera(part.data) for part in media):
        return []
    return [number for number, part in enumerate(media) if part.modality != "tensor"]


def _is_no_camera(data: bytes) -> bool:
    """Whether an npy file has the wrong number of axes for a camera."""
    end = _head_end(data)
    try:
        return bool(end) and len(_known(data[:end])[0]) != CAMERA_AXES
    except Exception:  # noqa: BLE001  a damaged file can fail in any way; the processor says how
        return False


_npy_header = functools.lru_cache(maxsize=64)(npy_header)


def as_npy(pixels: Pixels) -> bytes:
    """Return an image [h, w, 3] as an npy file."""
    return b"".join((_npy_header(pixels.shape, "uint8"), np.ascontiguousarray(pixels).data))


def _is_inline(data: bytes, side: int) -> bool:
    head = data[: _head_end(data)]
    if not head or len(data) - len(head) > max(SMALL_BYTES, 3 * side**2):
        return False
    return len(data) <= SMALL_BYTES or f"'|u1', 'fortran_order': False, 'shape': ({side}, {side}, 3)".encode() in head


def _head_end(data: bytes) -> int:
    """Return the offset of an npy file's data, or 0 for another format or a long header."""
    end = PLAIN_BYTES + int.from_bytes(data[PLAIN_BYTES - 2 : PLAIN_BYTES], "little")
    return end if data.startswith(PLAIN) and end <= HEAD_BYTES else 0


def sort_uploads(media: Sequence[MediaPart]) -> Uploads:
    """Sort files by use. Raises BadMedia for an unreadable file and RequestError for an array of another shape."""
    cameras: list[MediaPart | np.ndarray] = []
    arrays: dict[str, np.ndarray] = {}
    for number, part in enumerate(media):
        if part.modality != "tensor":
            cameras.append(part)
            continue
        array = read_array(part.data, number)
        match array.shape:
            case (_, _, _):
                cameras.append(array)
            case (_,) if "state" not in arrays:
                arrays["state"] = array
            case (_, width) if width == ACTION_WIDTH and "noise" not in arrays:
                arrays["noise"] = array
            case shape:
                raise RequestError(
                    f"file {number} has shape {list(shape)}, which does not fit a camera, state or noise",
                    hint=f"send {AXES}; state and noise once",
                    field=FIELD,
                    value=str(list(shape)),
                    allowed=AXES,
                )
    return Uploads(cameras=tuple(cameras), state=arrays.get("state"), noise=arrays.get("noise"))


def read_array(data: bytes, number: int) -> np.ndarray:
    """Return the only array of an npy or safetensors file. Only plain numbers are deserialised. Raises BadMedia."""
    try:
        array = _npy(data) if data.startswith(NPY_MAGIC) else _safetensors(data)
    except Exception as error:  # parsers may raise any exception on damaged data
        raise _unreadable(number, f"{type(error).__name__}: {error}") from error
    if array.dtype.kind not in "fiu" or not array.size:
        raise _unreadable(number, f"it contains {array.dtype.name} of shape {list(array.shape)}")
    return array


def _npy(data: bytes) -> np.ndarray:
    end = _head_end(data)
    (shape, is_fortran, dtype), at = (_known(data[:end]), end) if end else _head(data)
    count = math.prod(shape)
    # Checked against the file's size before memory is allocated for the claimed shape.
    if dtype.hasobject or count * dtype.itemsize != len(data) - at:
        raise ValueError(f"its header says {shape} of {dtype}, which does not match its data")
    flat: np.ndarray = np.frombuffer(data, dtype=dtype, count=count, offset=at)
    return flat.reshape(shape, order="F" if is_fortran else "C")


def _head(data: bytes) -> tuple[Head, int]:
    """Return a file's header and its end."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file), file.tell()


@functools.lru_cache(maxsize=64)
def _known(head: bytes) -> Head:
    """Return a parsed header. Cached: numpy compiles each one in 0.05 ms, and a robot's files have equal headers."""
    return _head(head)[0]


def _safetensors(data: bytes) -> np.ndarray:
    from safetensors.numpy import load

    tensors = load(data)
    if len(tensors) != 1:
        raise ValueError(f"it contains {len(tensors)} tensors instead of one")
    (array,) = tensors.values()
    return array


def _finite(array: np.ndarray, field: str) -> np.ndarray:
    wide = array.astype(np.float64)
    if not np.isfinite(wide).all():
        raise RequestError(f"{field} contains a value that is not finite", hint="send finite numbers", field=field)
    return wide


def _once(field: str, value: Any) -> None:
    if value is not None:
        raise RequestError(f"{field} was sent twice", "as a parameter and as a file", "send it once", field=field)


def _unreadable(number: int, detail: str) -> BadMedia:
    return BadMedia(
        f"file {number} contains no readable array",
        detail,
        "send .npy, or .safetensors with one tensor",
        field=FIELD,
        value=f"file {number}",
    )
