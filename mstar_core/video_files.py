"""Writer of MP4 files: frames in, H.264 out. Used by the jobs of the api, on threads, and by the client."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np

QUALITY: Final = {"crf": "18", "preset": "veryfast", "x264-params": "mbtree=0"}
"""Options of the encoder. Source: crf 18 to 20 is comparable with the official writer's quality.

Without the macroblock tree, because libx264 computes it differently from run to run on processors with AVX-512: equal
frames would give different files.
"""


class Film:
    """A file that is written frame by frame. Its header is moved to the front when it is closed."""

    def __init__(self, path: Path, width: int, height: int, rate: int) -> None:
        """width, height: pixels, even. rate: frames per second."""
        self._path = path
        self._size = (width, height)
        self._rate = rate
        self._container: Any = None
        self._stream: Any = None
        self.frames = 0

    def add(self, frames: np.ndarray) -> None:
        """Encode frames, uint8 [F, height, width, 3]."""
        import av

        if self._container is None:
            self._container = av.open(str(self._path), "w", format="mp4", options={"movflags": "+faststart"})
            self._stream = self._container.add_stream("libx264", rate=Fraction(self._rate), options=QUALITY)
            self._stream.width, self._stream.height = self._size
            self._stream.pix_fmt = "yuv420p"
        for picture in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            self._container.mux(self._stream.encode(frame))
            self.frames += 1

    def close(self) -> None:
        """Finish the file. Safe to call twice."""
        container, self._container = self._container, None
        if container is not None:
            container.mux(self._stream.encode(None))
            container.close()
