"""Camera images: decoding, and resizing into the model's square with black padding. Used by the processor.

Training used two resize methods: `fit_pillow` (openpi's server: antialiased, 8-bit) and `fit_floats` (lerobot and
openpi's tensors: bilinear without antialiasing). They agree on images of the model's size.
"""

from __future__ import annotations

import io
import warnings
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from mstar_core.errors import BadMedia, RequestError

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

FIELD: Final = "files"
MOST_PIXELS: Final = 64_000_000
"""Maximum pixels of one camera image. Larger files are refused to bound memory."""

BLACK: Final = -1.0


def decoded(data: bytes, number: int) -> Pixels:
    """Decode an uploaded file to uint8 [height, width, 3]. EXIF orientation is ignored: cameras do not
    rotate images.

    number: index of the upload, from 0. Raises BadMedia.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # this limit is lower than Pillow's
            with Image.open(io.BytesIO(data)) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise _bad(number, f"it has {image.width} x {image.height} pixels, allowed are {MOST_PIXELS}")
                # Converting an RGB image would copy all pixels.
                return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except BadMedia:
        raise
    except Exception as error:  # decoders may raise any exception on damaged data
        raise _bad(number, f"{type(error).__name__}: {error}") from error


def from_array(array: npt.NDArray[Any], title: str, field: str) -> Pixels | Floats:
    """Return an image that was uploaded as an array, [h, w, 3]: uint8 unchanged, floats of [0, 1] as
    float32 of [-1, 1].

    array: [h, w, 3] or [3, h, w]. Its dtype determines the range of the values. Raises RequestError.
    """
    if array.ndim != 3 or 3 not in (array.shape[0], array.shape[2]) or not array.size:
        raise _odd(title, f"has shape {list(array.shape)}", field, "[h, w, 3] or [3, h, w]")
    pixels = array.transpose(1, 2, 0) if array.shape[0] == 3 else array
    if pixels.shape[0] * pixels.shape[1] > MOST_PIXELS:
        raise _odd(title, f"has {pixels.shape[1]} x {pixels.shape[0]} pixels", field, f"<= {MOST_PIXELS}")
    if pixels.dtype == np.uint8:
        return np.ascontiguousarray(pixels)
    if pixels.dtype.kind != "f":
        raise _odd(title, f"is {pixels.dtype.name}", field, "uint8, or floats in [0, 1]")
    floats = np.ascontiguousarray(pixels, dtype=np.float32)
    if not np.isfinite(floats).all():
        raise _odd(title, "contains a value that is not finite", field, "numbers in [0, 1]")
    low, high = float(floats.min()), float(floats.max())
    if low < 0 or high > 1:
        raise _odd(title, f"contains floats from {low:g} to {high:g}", field, "0 to 1")
    return floats * np.float32(2.0) - np.float32(1.0)


def fitted(image: Pixels | Floats, side: int, resize: str) -> Pixels | Floats:
    """Resize a camera image to [side, side, 3], uint8 or float32 in [-1, 1].

    image: [height, width, 3], uint8 or float32 in [-1, 1]. resize: `pillow` or `tensor`, for uint8; floats are always
    resized as tensors.
    """
    if image.shape[:2] == (side, side):
        return image
    if image.dtype == np.uint8 and resize == "pillow":
        return fit_pillow(image.astype(np.uint8, copy=False), side)
    return fit_floats(signed(image), side)


def fit_pillow(image: Pixels, side: int) -> Pixels:
    """Resize uint8 [h, w, 3] to [side, side, 3] with Pillow's bilinear filter and zero padding."""
    height, width = _inner(image.shape, side)
    small = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
    out = np.zeros((side, side, 3), dtype=np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    out[top : top + height, left : left + width] = np.asarray(small)
    return out


def fit_floats(image: Floats, side: int) -> Floats:
    """Resize float32 [h, w, 3] in [-1, 1] to [side, side, 3]: bilinear without antialiasing, padded with -1."""
    height, width = _inner(image.shape, side)
    small = _bilinear(_bilinear(image, height, 0), width, 1).clip(-1.0, 1.0)
    out = np.full((side, side, 3), BLACK, dtype=np.float32)
    top, left = (side - height) // 2, (side - width) // 2
    out[top : top + height, left : left + width] = small
    return out


def signed(image: Pixels | Floats) -> Floats:
    """Convert uint8 to float32 in [-1, 1]. Floats are unchanged."""
    if image.dtype != np.uint8:
        return image.astype(np.float32, copy=False)
    return image.astype(np.float32) / np.float32(255.0) * np.float32(2.0) - np.float32(1.0)


def _inner(shape: tuple[int, ...], side: int) -> tuple[int, int]:
    """Return height and width that keep the aspect ratio and fit the square, at least one pixel each."""
    ratio = max(shape[1] / side, shape[0] / side)
    return max(1, int(shape[0] / ratio)), max(1, int(shape[1] / ratio))


def _bilinear(image: Floats, size: int, axis: int) -> Floats:
    """Resize one axis bilinearly, with pixel centres at halves (torch's align_corners=False)."""
    have = image.shape[axis]
    if have == size:
        return image
    place = np.maximum((np.arange(size, dtype=np.float32) + 0.5) * np.float32(have / size) - 0.5, 0)
    low = np.minimum(place.astype(np.int64), have - 1)
    share = (place - low).astype(np.float32).reshape(-1, *(1,) * (image.ndim - axis - 1))
    first, second = image.take(low, axis), image.take(np.minimum(low + 1, have - 1), axis)
    mixed: Floats = first * (np.float32(1.0) - share) + second * share
    return mixed


def _odd(title: str, what: str, field: str, allowed: str) -> RequestError:
    return RequestError(f"{title} {what}", hint=f"send {allowed}", field=field, value=what, allowed=allowed)


def _bad(number: int, detail: str) -> BadMedia:
    return BadMedia(
        f"camera image {number} cannot be read", detail, "send PNG, JPEG or WebP", field=FIELD, value=f"file {number}"
    )
