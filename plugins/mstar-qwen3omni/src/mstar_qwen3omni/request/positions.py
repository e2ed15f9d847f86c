"""Positions of prompt tokens on three axes: time, height and width (TMRoPE, specification section 7).

A token has three float positions. Text and audio advance all of them by one. A picture or video frame spreads over
height and width, and a video also over time, 13 positions a second. Times of frames may be fractional.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Positions = npt.NDArray[np.float32]
    Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Tokens of a picture or video after merging: frame pairs, rows and columns.

    pair_ticks: positions from one frame pair to the next; 0 for a picture, which has one pair.
    """

    pairs: int
    rows: int
    columns: int
    pair_ticks: float = 0.0

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.pairs * self.rows * self.columns

    def offsets(self) -> npt.NDArray[np.float64]:
        """Return the offsets of all tokens from the first one: [3, tokens], in token order."""
        pair, row, column = np.meshgrid(
            np.arange(self.pairs, dtype=np.float64) * self.pair_ticks,
            np.arange(self.rows, dtype=np.float64),
            np.arange(self.columns, dtype=np.float64),
            indexing="ij",
        )
        return np.stack([axis.reshape(-1) for axis in (pair, row, column)])


def interleave(grid: Grid, sounds: int) -> npt.NDArray[np.bool_]:
    """Merge the tokens of a video and of its sound by time. Returns [grid.tokens + sounds], true at sound tokens.

    The video token precedes the sound token of the same time. Sound token a has time a.
    """
    times = grid.offsets()[0]
    # A sound token follows all video tokens whose time does not exceed its own.
    before = np.searchsorted(times, np.arange(sounds, dtype=np.float64), side="right")
    is_sound = np.zeros(grid.tokens + sounds, dtype=np.bool_)
    is_sound[before + np.arange(sounds)] = True
    return is_sound


class PositionCounter:
    """Running position of one sequence. Owned by the function that lays out a prompt.

    `next` is the position of the next text token by the rule. `top` is one more than the greatest position so far,
    which the engine uses for tokens without given positions. They differ after a video with sound whose frames are
    wider or higher than its tail is long.
    """

    def __init__(self) -> None:
        self.next = 0.0
        self.top = 0.0

    def run(self, count: int) -> Positions | None:
        """Place tokens of text or audio. Returns [3, count], or None if the engine gives them the same positions."""
        start, self.next = self.next, self.next + count
        is_plain = start == self.top
        self.top = max(self.top, self.next)
        if is_plain:
            return None
        line = (start + np.arange(count, dtype=np.float64)).astype(np.float32)
        return np.ascontiguousarray(np.broadcast_to(line, (3, count)))

    def picture(self, grid: Grid) -> Positions:
        """Place the tokens of a picture, or of a video without its sound. Returns [3, tokens]."""
        return self._placed(self.next + grid.offsets())

    def heard_video(self, grid: Grid, is_sound: npt.NDArray[np.bool_]) -> Positions:
        """Place a video and its sound, which start together. is_sound: from `interleave`. Returns [3, tokens]."""
        placed = np.empty((3, len(is_sound)), dtype=np.float64)
        placed[:, ~is_sound] = self.next + grid.offsets()
        placed[:, is_sound] = self.next + np.arange(np.count_nonzero(is_sound), dtype=np.float64)
        return self._placed(placed, tail=_tail(is_sound))

    def _placed(self, placed: npt.NDArray[np.float64], tail: int = 0) -> Positions:
        """Advance past placed tokens. tail: index of the first token that determines the next position."""
        self.next = float(placed[:, tail:].max()) + 1
        self.top = max(self.top, float(placed.max()) + 1)
        return placed.astype(np.float32)


def _tail(is_sound: npt.NDArray[np.bool_]) -> int:
    """Return where the tokens begin that remain once either the video or the sound is used up."""
    sounds, pictures = np.flatnonzero(is_sound), np.flatnonzero(~is_sound)
    if not len(sounds) or not len(pictures):
        return 0
    return int(min(sounds[-1], pictures[-1])) + 1
