"""Bicubic resizing of 8-bit images on any device, with the bits of Pillow 13. Used by the image encoders of plugins.

Pillow computes with integers: weights of 22 fractional bits, one pass per axis, each rounded to 8 bits. Since Pillow 13
the rows come first if far more of them go than columns. The same integers give the same pixels on a GPU, so that a pool
process need not resize. Source: Pillow's `Resample.c`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

FRACTION_BITS: Final = 22
"""Fractional bits of a weight: 8 bits of a pixel and 2 of overshoot are left in 32."""

REACH: Final = 2.0
"""Half the width of the bicubic filter."""

SHARPNESS: Final = -0.5
"""Parameter of the bicubic filter."""

MOST_PRODUCTS: Final = 1 << 24
"""Products of pixels and weights that are in memory at once: 80 MB."""

MOST_TABLES: Final = 64
"""Pairs of sides whose tables are kept: 60 to 80 KB each for a side of 1000."""


class PixelResize:
    """Resizes images and keeps the tables of their sides. Owned by a module of one device."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(self, image: Tensor, height: int, width: int) -> Tensor:
        """Return the image as `Image.resize((width, height), BICUBIC)` gives it.

        image: uint8 [channels, y, x]. Returns uint8 [channels, height, width].
        """
        lost = image.shape[1] - height, image.shape[2] - width
        for axis in (1, 2) if lost[0] > max(0, 2 * lost[1]) else (2, 1):
            image = self._along(image, axis, (height, width)[axis - 1])
        return image

    def _along(self, image: Tensor, axis: int, side: int) -> Tensor:
        """Return the image with another side along an axis."""
        if image.shape[axis] == side:
            return image
        places, weights = self._table(image.shape[axis], side, image.device)
        lines = max(1, MOST_PRODUCTS // (image.shape[0] * places.shape[1] * (image.shape[2] if axis == 1 else side)))
        if axis == 1:
            sums = [
                (image[:, place] * weight[..., None]).sum(2, dtype=torch.int32)
                for place, weight in zip(places.split(lines), weights.split(lines), strict=True)
            ]
        else:
            sums = [(part[:, :, places] * weights).sum(3, dtype=torch.int32) for part in image.split(lines, dim=1)]
        return torch.cat([_rounded(each) for each in sums], dim=1)

    def _table(self, source: int, target: int, device: torch.device) -> tuple[Tensor, Tensor]:
        key = source, target, device
        if key not in self._tables:
            if len(self._tables) >= MOST_TABLES:
                del self._tables[next(iter(self._tables))]
            places, weights = filter_table(source, target)
            self._tables[key] = torch.from_numpy(places).to(device), torch.from_numpy(weights).to(device)
        return self._tables[key]


def filter_table(source: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source places and their weights for each target place, int64 and int32 [target, taps].

    Places beyond an end have weight 0. Weights are in units of 2**-FRACTION_BITS.
    """
    scale = source / target
    stretch = max(1.0, scale)
    reach, taps = REACH * stretch, math.ceil(REACH * stretch) * 2 + 1
    centers = (np.arange(target) + 0.5) * scale
    first = np.maximum(0, (centers - reach + 0.5).astype(np.int64))
    stop = np.minimum(source, (centers + reach + 0.5).astype(np.int64))
    places = first[:, None] + np.arange(taps)
    values = _bicubic((places - centers[:, None] + 0.5) * (1.0 / stretch))
    values[places >= stop[:, None]] = 0.0
    total = np.zeros(target)
    for column in values.T:  # in Pillow's order of additions
        total += column
    values /= total[:, None]
    scaled = values * (1 << FRACTION_BITS)
    weights = np.trunc(scaled + np.where(values < 0, -0.5, 0.5)).astype(np.int32)
    return np.minimum(places, source - 1), weights


def _bicubic(x: np.ndarray) -> np.ndarray:
    x, a = np.abs(x), SHARPNESS
    inside = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    outside = (((x - 5) * x + 8) * x - 4) * a
    weights: np.ndarray = np.where(x < 1.0, inside, np.where(x < 2.0, outside, 0.0))
    return weights


def _rounded(values: Tensor) -> Tensor:
    """Return pixels of sums with FRACTION_BITS, in place. values: int32."""
    pixels = values.add_(1 << (FRACTION_BITS - 1)).bitwise_right_shift_(FRACTION_BITS)
    return pixels.clamp_(0, 255).to(torch.uint8)
