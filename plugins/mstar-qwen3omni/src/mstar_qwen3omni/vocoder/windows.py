"""Samples of a window that are new to the client. Host arithmetic of the node `Code2Wav`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mstar_qwen3omni.params import CODEC_CHUNK, CODEC_FIRST, CODEC_LEFT


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """Frames of the windows of one stream: `first`, then `chunk` new ones each, behind up to `left` earlier ones.

    A first window is never longer than `chunk`, as in `LeftContext`.
    """

    first: int
    chunk: int
    left: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", min(self.first, self.chunk))

    def start(self, step: int) -> int:
        """Return the first new frame of window `step`."""
        return 0 if step == 0 else self.first + (step - 1) * self.chunk

    def context(self, step: int) -> int:
        """Return the earlier frames in window `step`."""
        return min(self.left, self.start(step))

    def length(self, step: int) -> int:
        """Return the frames of window `step` unless the stream ends in it."""
        return self.context(step) + (self.first if step == 0 else self.chunk)


USUAL: Final = Chunking(first=CODEC_FIRST, chunk=CODEC_CHUNK, left=CODEC_LEFT)
"""The windows of requests with default parameters, which are captured before the first one."""


def fresh_samples(chunking: Chunking, step: int, frames: int, *, frame: int, lost: int) -> slice:
    """Return the samples of a decoded window of `frames` frames that no earlier window of its stream returned.

    frame: samples of a frame; lost: samples that one decode returns fewer than its frames hold, because their last
    ones depend on the next frame. The pieces of a stream are continuous if `left` is at least 1. Without left context
    the lost samples of each window are missing. Source: specification section 13, streaming.
    """
    begun, context = chunking.start(step), chunking.context(step)
    sent = max(0, frame * begun - lost)
    low = max(0, sent - frame * (begun - context))
    return slice(low, max(low, frame * frames - lost))
