"""Frame preprocessing with numpy and Pillow: one transform for V-JEPA 2, another for V-JEPA 2-AC."""

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
"""Ratio of the resized shortest edge to the crop."""


def shortest_edge(crop: int) -> int:
    """Return the length of the shortest edge before cropping, in pixels."""
    return int(crop * RESIZED)


def cropped(frame: Frame, crop: int) -> Pixels:
    """Preprocess a frame for V-JEPA 2: antialiased 8-bit resize and centre crop.

    frame: uint8 RGB [H, W, 3]. Returns uint8 [3, crop, crop]. Raises RequestError for an extreme aspect ratio.
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
    """Preprocess a frame for V-JEPA 2-AC: centre square, float resize without antialiasing, normalisation.

    frame: uint8 RGB [H, W, 3]. Returns float32 [3, crop, crop].
    """
    height, width = frame.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = frame[top : top + side, left : left + side]
    first, second, share = _taps(side, crop)
    weight = share[:, None, None]
    # Rows are selected before the conversion to floats: most rows of a large frame are not used.
    rows = square[first].astype(np.float32) * (1 - weight) + square[second].astype(np.float32) * weight
    weight = share[None, :, None]
    return normalised((rows[:, first] * (1 - weight) + rows[:, second] * weight).transpose(2, 0, 1))


def normalised(pixels: Pixels) -> Pixels:
    """Normalise pixels [..., 3, H, W] of 0 to 255 with the training's mean and standard deviation. Returns float32."""
    mean, std = (255 * np.asarray(values, dtype=np.float32).reshape(3, 1, 1) for values in (MEAN, STD))
    normal: Pixels = np.ascontiguousarray((pixels.astype(np.float32) - mean) / std)
    return normal


def _taps(size: int, target: int) -> tuple[Pixels, Pixels, Pixels]:
    """Return two source indices and the weight of the second for each of `wanted` positions."""
    place = np.maximum((np.arange(target, dtype=np.float32) + 0.5) * np.float32(size / target) - 0.5, 0)
    first = np.minimum(place.astype(np.int64), size - 1)
    return first, np.minimum(first + 1, size - 1), (place - first).astype(np.float32)
