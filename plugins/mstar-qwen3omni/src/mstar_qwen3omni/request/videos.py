"""Choice and decoding of the frames of a video (specification section 6). Used by the processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mstar_core.errors import BadMedia
from mstar_core.plugin.media import MediaLimits, VideoFile
from mstar_qwen3omni.checkpoint.config import PATCH_FRAMES, VisionSizes
from mstar_qwen3omni.request.images import PixelRange, grid_of, patches_of, resized, target_size
from mstar_qwen3omni.request.positions import Grid

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Frame = npt.NDArray[np.uint8]

LEAST_FRAMES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Frames that a request asks for. fps: frames per second to take; most: limit of frames."""

    fps: float
    most: int

    def choose(self, total: int, rate: float) -> list[int]:
        """Return ascending frame indices, one at the start of each of equally long parts.

        total: frames of the video; rate: its frames per second. The count is even, at least 4 and at most `most`, if
        the video is long enough.
        """
        frames = min(max(total / rate * self.fps, LEAST_FRAMES), self.most, total)
        count = max(1, int(frames) // PATCH_FRAMES * PATCH_FRAMES)
        return [index * total // count for index in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A read video. patches: uint8 [p, values]; fps: true rate of the chosen frames."""

    patches: Frame
    grid: Grid
    fps: float


def read_clip(
    data: bytes,
    limits: MediaLimits,
    sampling: Sampling,
    pixels: PixelRange,
    sizes: VisionSizes,
    ticks: int,
    check: Callable[[int], None],
) -> Clip:
    """Read the chosen frames of a video, resized and cut to patches.

    ticks: positions per second. check: receives the number of tokens before any frame is decoded, and raises if they do
    not fit. Raises BadMedia for a video without frames or rate, TooLarge, and RequestError for an extreme shape.
    """
    from PIL import Image

    with VideoFile(data, limits) as video:
        total, rate = video.count(), video.rate
        if not total:
            raise BadMedia("the video has no frames", hint="send a whole video", field="files", code="too_few_frames")
        rate = rate or _rate(total, video.seconds)
        chosen = sampling.choose(total, rate)
        fps = len(chosen) * rate / total
        unit = sizes.patch * sizes.merge
        frames: list[Frame] = []
        grid: Grid | None = None
        for frame in video.frames(chosen):
            if grid is None:  # the size comes from an upright frame, which the header does not give
                height, width = target_size(frame.shape[0], frame.shape[1], unit, pixels)
                grid = grid_of(len(chosen), height, width, sizes, PATCH_FRAMES / fps * ticks)
                check(grid.tokens)
            frames.append(resized(Image.fromarray(frame), height, width))
    assert grid is not None
    return Clip(patches=patches_of(frames, grid, sizes), grid=grid, fps=fps)


def _rate(total: int, seconds: float | None) -> float:
    if not seconds or seconds <= 0:
        raise BadMedia("the video has no frame rate", hint="send a video with a constant frame rate", field="files")
    return total / seconds
