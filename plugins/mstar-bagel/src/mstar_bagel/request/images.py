"""Resizing of input images. Source: the specification, section 7."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from PIL import Image

    from mstar_bagel.checkpoint.config import ResizeRule

MOST_PIXELS: Final = 14 * 14 * 9 * 1024
"""Most pixels of a resized image. The rules of the official checkpoint never reach it."""

LEAST_AT_ONCE: Final = 1 << 17
"""Pixels from which the bands of an image are resized at once: a smaller one takes less time than waking threads."""

Result = TypeVar("Result")


def resized_size(size: tuple[int, int], rule: ResizeRule) -> tuple[int, int]:
    """Return width and height after a rule. The longest side wins where both bounds cannot hold."""
    width, height = size
    scale = max(min(rule.longest / max(width, height), 1.0), rule.shortest / min(width, height))
    width, height = _scaled(width, height, scale, rule.stride)
    if width * height > MOST_PIXELS:
        width, height = _scaled(width, height, MOST_PIXELS / (width * height), rule.stride)
    if max(width, height) > rule.longest:
        width, height = _scaled(width, height, rule.longest / max(width, height), rule.stride)
    return width, height


def _scaled(width: int, height: int, scale: float, stride: int) -> tuple[int, int]:
    return _snapped(round(width * scale), stride), _snapped(round(height * scale), stride)


def _snapped(side: int, stride: int) -> int:
    return max(stride, round(side / stride) * stride)


def resize(image: Image.Image, rule: ResizeRule) -> Image.Image:
    """Return an 8-bit image, or one band of it, after a rule: bicubic with antialiasing."""
    from PIL import Image as Pillow

    size = resized_size(image.size, rule)
    return image if size == image.size else image.resize(size, Pillow.Resampling.BICUBIC)


class Bands:
    """Runs work on the colour bands of an image, those of a large image at once. Owned by a processor.

    Pillow resizes each band by itself and without its interpreter lock, so the bands have the values of the image.
    """

    def __init__(self, cores: int | None = None) -> None:
        """cores: that this process may use; None: ask the system."""
        self._cores = len(os.sched_getaffinity(0)) if cores is None else cores
        self._threads: ThreadPoolExecutor | None = None

    def map(self, image: Image.Image, work: Callable[[Image.Image], Result]) -> list[Result]:
        """Return the results of the bands in order. Raises the error of the first band that fails."""
        bands = image.split()
        if self._cores == 1 or image.width * image.height < LEAST_AT_ONCE:
            return [work(band) for band in bands]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(bands), thread_name_prefix="band")
        return list(self._threads.map(work, bands))


def fitted_size(size: tuple[int, int], box: tuple[int | None, int | None], multiple: int) -> tuple[int, int]:
    """Return the size of an edit: the input's, made smaller to fit in a box; sides are multiples of `multiple`.

    box: width and height; None does not bound.
    """
    bounds = [limit / side for limit, side in zip(box, size, strict=True) if limit is not None]
    scale = min([1.0, *bounds])
    width, height = (max(multiple, int(side * scale + 1e-6) // multiple * multiple) for side in size)
    return width, height
