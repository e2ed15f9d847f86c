"""Conditioning images: a size for the video, and the image in that size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

AREA: Final = 704 * 1280
"""Pixels of a frame that takes its aspect ratio from an image."""


def best_size(size: tuple[int, int], multiple: int, area: int = AREA) -> tuple[int, int]:
    """Return width and height near `area` whose ratio is nearest to that of an image of this width and height."""
    ratio = size[0] / size[1]
    width, height = math.sqrt(area * ratio), math.sqrt(area / ratio)
    first = max(multiple, int(width) // multiple * multiple)
    by_width = first, max(multiple, int(area / first) // multiple * multiple)
    second = max(multiple, int(height) // multiple * multiple)
    by_height = max(multiple, int(area / second) // multiple * multiple), second

    def distance(candidate: tuple[int, int]) -> float:
        found = candidate[0] / candidate[1]
        return max(ratio / found, found / ratio)

    return by_width if distance(by_width) < distance(by_height) else by_height


def fitted(image: Image, size: tuple[int, int], *, is_stretched: bool) -> np.ndarray:
    """Return an image of this width and height as uint8 [3, height, width]: stretched, or scaled to cover and cut."""
    from PIL.Image import Resampling

    rgb = image.convert("RGB")
    width, height = size
    if is_stretched:
        made = rgb.resize(size, Resampling.LANCZOS)
    else:
        factor = max(width / rgb.width, height / rgb.height)
        scaled = max(width, round(rgb.width * factor)), max(height, round(rgb.height * factor))
        left, top = (scaled[0] - width) // 2, (scaled[1] - height) // 2
        made = rgb.resize(scaled, Resampling.LANCZOS).crop((left, top, left + width, top + height))
    return np.ascontiguousarray(np.asarray(made, dtype=np.uint8).transpose(2, 0, 1))
