"""Resizing of input images. Source: the specification, section 7."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from PIL import Image

    from mstar_bagel.checkpoint.config import ResizeRule

MOST_PIXELS: Final = 14 * 14 * 9 * 1024
"""Most pixels of a resized image. The rules of the official checkpoint never reach it."""


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


def fitted_size(size: tuple[int, int], box: tuple[int | None, int | None], multiple: int) -> tuple[int, int]:
    """Return the size of an edit: the input's, made smaller to fit in a box; sides are multiples of `multiple`.

    box: width and height; None does not bound.
    """
    bounds = [limit / side for limit, side in zip(box, size, strict=True) if limit is not None]
    scale = min([1.0, *bounds])
    width, height = (max(multiple, int(side * scale + 1e-6) // multiple * multiple) for side in size)
    return width, height
