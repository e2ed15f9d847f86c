"""Bands of an image: resized apart they have the pixels of the image, whichever axis Pillow resizes first."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from mstar_core.plugin.media.bands import LEAST_AT_ONCE, Bands

CORES = (1, 4)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [((980, 980), (976, 976)), ((523, 1711), (320, 1024)), ((640, 401), (816, 512)), ((31, 77), (416, 1024))],
)
def test_bands_resized_apart_have_the_pixels_of_the_image(given: tuple[int, int], wanted: tuple[int, int]) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (given[1], given[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels)

    def resized(band: Image.Image) -> np.ndarray:
        return np.asarray(band.resize(wanted, Image.Resampling.BICUBIC))

    whole = resized(image).transpose(2, 0, 1)
    for cores in CORES:
        assert np.array_equal(np.stack(Bands(cores).map(image, resized)), whole)


@pytest.mark.parametrize("cores", CORES)
def test_a_band_that_fails_fails_the_image(cores: int) -> None:
    def fail(band: Image.Image) -> None:
        raise ValueError(f"{band.width} is too wide")

    bands, side = Bands(cores), int(LEAST_AT_ONCE**0.5) + 1
    with pytest.raises(ValueError, match=f"{side} is too wide"):
        bands.map(Image.new("RGB", (side, side)), fail)
    assert bands.map(Image.new("RGB", (side, side)), lambda band: band.mode) == ["L"] * 3
