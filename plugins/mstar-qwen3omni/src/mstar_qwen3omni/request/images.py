"""Pictures and video frames as patches of the vision encoder (specification section 6). Used by the processor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from mstar_core.errors import RequestError
from mstar_qwen3omni.checkpoint.config import PATCH_FRAMES, VisionSizes
from mstar_qwen3omni.request.positions import Grid

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image

    from mstar_core.plugin.media.bands import Bands

    Frame = npt.NDArray[np.uint8]

MAX_RATIO: Final = 200
"""Greatest ratio of the longer to the shorter side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelRange:
    """Allowed pixels of a picture after resizing."""

    least: int
    most: int


def target_size(height: int, width: int, unit: int, pixels: PixelRange) -> tuple[int, int]:
    """Return the height and width to resize a picture to: multiples of `unit` within the range of pixels.

    unit: side of a merged patch in pixels. Raises RequestError if the longer side is over 200 times the shorter one.
    """
    longer, shorter = max(height, width), max(1, min(height, width))
    if longer > MAX_RATIO * shorter:
        raise RequestError(
            f"the picture has {width} x {height} pixels",
            f"its longer side is over {MAX_RATIO} times the shorter one",
            "cut it to a usual shape",
            field="files",
            value=f"{width}x{height}",
            allowed=f"a ratio of {MAX_RATIO}",
        )
    rows, columns = (round(side / unit) for side in (height, width))
    if rows * columns * unit**2 > pixels.most:
        scale = math.sqrt(height * width / pixels.most)
        rows, columns = (max(1, math.floor(side / scale / unit)) for side in (height, width))
    elif rows * columns * unit**2 < pixels.least:
        scale = math.sqrt(pixels.least / (height * width))
        rows, columns = (math.ceil(side * scale / unit) for side in (height, width))
    return rows * unit, columns * unit


def resized(image: Image.Image, height: int, width: int, bands: Bands | None = None) -> Frame:
    """Resize an RGB image with an antialiased bicubic filter. Returns uint8 [height, width, 3]."""
    from PIL import Image

    if image.size == (width, height):
        return np.asarray(image)
    size, bicubic = (width, height), Image.Resampling.BICUBIC
    if bands is None:
        return np.asarray(image.resize(size, bicubic))
    return np.asarray(Image.merge("RGB", bands.map(image, lambda band: band.resize(size, bicubic))))


def grid_of(frames: int, height: int, width: int, sizes: VisionSizes, pair_ticks: float = 0.0) -> Grid:
    """Return the tokens of `frames` pictures of this size, two of which make a pair."""
    unit = sizes.patch * sizes.merge
    pairs = -(-frames // PATCH_FRAMES)
    return Grid(pairs=pairs, rows=height // unit, columns=width // unit, pair_ticks=pair_ticks)


def patch_grid(grid: Grid, sizes: VisionSizes) -> npt.NDArray[np.int64]:
    """Return the number of patches in time, height and width: int64 [3]."""
    return np.array([grid.pairs, grid.rows * sizes.merge, grid.columns * sizes.merge], dtype=np.int64)


def patches_of(frames: Sequence[Frame], grid: Grid, sizes: VisionSizes) -> Frame:
    """Cut frames into patches. An odd last frame is repeated.

    frames: uint8 [height, width, 3] each. Returns uint8 [patches, 3 * 2 * patch * patch]: values ordered by channel,
    frame of the pair, row and column; patches by pair, block of merged patches, then row and column in the block.
    """
    size, merge = sizes.patch, sizes.merge
    patches = np.empty((grid.pairs, grid.rows, grid.columns, merge, merge, 3, PATCH_FRAMES, size, size), dtype=np.uint8)
    if len(frames) == 1:
        patches[0] = np.ascontiguousarray(_blocks(frames[0], grid, sizes))[
            ..., None, :, :
        ]  # one pass over the pixels for both frames
        return patches.reshape(-1, sizes.patch_values)
    for index in range(grid.pairs * PATCH_FRAMES):
        frame = frames[min(index, len(frames) - 1)]
        patches[index // PATCH_FRAMES, ..., index % PATCH_FRAMES, :, :] = _blocks(frame, grid, sizes)
    return patches.reshape(-1, sizes.patch_values)


def _blocks(frame: Frame, grid: Grid, sizes: VisionSizes) -> Frame:
    """Return a view of a frame by block, patch and channel: [rows, columns, merge, merge, 3, patch, patch]."""
    size, merge = sizes.patch, sizes.merge
    return frame.reshape(grid.rows, merge, size, grid.columns, merge, size, 3).transpose(0, 3, 1, 4, 6, 2, 5)
