"""Images resized on a device have the bits of Pillow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from mstar_core.layers import pixel_resize
from mstar_core.layers.pixel_resize import MOST_TABLES, PixelResize

BICUBIC = Image.Resampling.BICUBIC


@pytest.mark.parametrize(
    ("given", "wanted", "rows_first"),
    [
        ((490, 490), (488, 488), False),
        ((488, 488), (490, 490), False),
        ((256, 256), (259, 259), False),
        ((75, 52), (80, 48), True),
        ((80, 48), (84, 42), True),
        ((31, 77), (31, 102), False),
        ((3, 1), (98, 42), False),
        ((700, 600), (42, 28), False),
        ((40, 90), (32, 74), False),
        ((40, 90), (32, 73), True),
        ((60, 60), (60, 60), False),
    ],
)
def test_pixels_equal_those_of_pillow(given: tuple[int, int], wanted: tuple[int, int], rows_first: bool) -> None:
    rng = np.random.default_rng(3)
    noise = rng.integers(0, 256, (given[1], given[0], 3), dtype=np.uint8)
    between = (given[0], wanted[1]) if rows_first else (wanted[0], given[1])  # older releases have columns first
    for pixels in (noise, (noise > 127).astype(np.uint8) * 255):  # edges overshoot at both ends
        image = Image.fromarray(pixels).resize(between, BICUBIC).resize(wanted, BICUBIC)
        actual = PixelResize()(torch.from_numpy(pixels).permute(2, 0, 1), wanted[1], wanted[0])
        assert np.array_equal(actual.permute(1, 2, 0).numpy(), np.asarray(image))


def test_a_large_image_is_resized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.randint(0, 256, (3, 60, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    whole = PixelResize()(image, 48, 64)
    for most in (1, 3 * 7 * 64 * 7):
        monkeypatch.setattr(pixel_resize, "MOST_PRODUCTS", most)
        assert torch.equal(PixelResize()(image, 48, 64), whole)


def test_tables_of_many_sizes_are_bounded() -> None:
    resize, image = PixelResize(), torch.zeros(1, 4, 4, dtype=torch.uint8)
    for width in range(5, 5 + 2 * MOST_TABLES):
        resize(image, 4, width)
    assert len(resize._tables) <= MOST_TABLES
