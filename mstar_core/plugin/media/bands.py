"""Work on the colour bands of an image, at once if it is large. Used by processors, which resize images."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from PIL import Image

LEAST_AT_ONCE: Final = 1 << 17
"""Pixels from which bands are worked on at once: a smaller image takes less time than waking threads."""

Result = TypeVar("Result")


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
