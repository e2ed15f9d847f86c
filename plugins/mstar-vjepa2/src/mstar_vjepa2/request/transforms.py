"""What becomes of a frame before it is encoded: one way for V-JEPA 2, another for V-JEPA 2-AC. numpy and Pillow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import RequestError
from mstar_vjepa2.checkpoint.config import MEAN, STD
from mstar_vjepa2.request.media import MOST_PIXELS

if TYPE_CHECKING:
    import numpy.typing as npt

    from mstar_vjepa2.request.media import Frame

    Pixels = npt.NDArray[Any]

RESIZED: Final = 256 / 224
"""The shortest edge before cropping, in crops."""


def shortest_edge(crop: int) -> int:
    """Pixels of the shortest edge that a clip is resized to before it is cropped."""
    return int(crop * RESIZED)


def cropped(frame: Frame, crop: int) -> Pixels:
    """A frame of V-JEPA 2: resized with antialias on 8 bits, and cut in the middle.

    frame: uint8 RGB [H, W, 3]. Returns uint8 [3, crop, crop]. Raises RequestError for a frame that is all length.
    """
    from PIL import Image

    height, width = frame.shape[:2]
    short, long = sorted((height, width))
    edge = shortest_edge(crop)
    other = int(edge * long / short)
    if edge * other > MOST_PIXELS:
        raise RequestError(
            f"a frame of {width} x {height} pixels is too long and thin",
            f"resized it would have {edge * other} pixels, allowed are {MOST_PIXELS}",
            "cut it to a usual shape",
            field="video",
            value=f"{width}x{height}",
        )
    size = (other, edge) if width >= height else (edge, other)
    image = Image.fromarray(frame).resize(size, Image.Resampling.BILINEAR)
    left, top = int((size[0] - crop) / 2), int((size[1] - crop) / 2)
    part = image.crop((left, top, left + crop, top + crop))
    return np.ascontiguousarray(np.asarray(part).transpose(2, 0, 1))


def squared(frame: Frame, crop: int) -> Pixels:
    """A frame of V-JEPA 2-AC: the middle square, resized in floats without antialias, normalised.

    frame: uint8 RGB [H, W, 3]. Returns float32 [3, crop, crop].
    """
    height, width = frame.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = frame[top : top + side, left : left + side]
    first, second, share = _taps(side, crop)
    weight = share[:, None, None]
    # Rows are chosen before they become floats: of a large frame most are not looked at.
    rows = square[first].astype(np.float32) * (1 - weight) + square[second].astype(np.float32) * weight
    weight = share[None, :, None]
    return normalised((rows[:, first] * (1 - weight) + rows[:, second] * weight).transpose(2, 0, 1))


def normalised(pixels: Pixels) -> Pixels:
    """Pixels [..., 3, H, W] on a scale of 0 to 255 with the training's mean and spread, float32."""
    mean, std = (255 * np.asarray(each, dtype=np.float32).reshape(3, 1, 1) for each in (MEAN, STD))
    made: Pixels = np.ascontiguousarray((pixels.astype(np.float32) - mean) / std)
    return made


def _taps(size: int, wanted: int) -> tuple[Pixels, Pixels, Pixels]:
    """Where each of `wanted` places lies between two of `size`: both indices and the second one's share."""
    place = np.maximum((np.arange(wanted, dtype=np.float32) + 0.5) * np.float32(size / wanted) - 0.5, 0)
    first = np.minimum(place.astype(np.int64), size - 1)
    return first, np.minimum(first + 1, size - 1), (place - first).astype(np.float32)
