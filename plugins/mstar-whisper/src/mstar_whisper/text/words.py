"""Times of words: ids are aligned with the sound by dynamic time warping, and joined to words.

Source: `transformers`, token timestamps of Whisper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstar_whisper.text.segments import STEP_S

Array = npt.NDArray[Any]

UNSPACED: Final = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages whose words have no spaces between them: each character is a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word and its seconds from the start of the window."""

    text: str
    start_s: float
    end_s: float


def times(weights: Array) -> list[float]:
    """Return the seconds at which each id ends, from the start of the window.

    weights: what each id listens to, [ids, states].
    """
    if not weights.size:
        return [0.0] * len(weights)
    ids, states = warped(-weights.astype(np.float64))
    jumps = np.pad(np.diff(ids), (1, 0), constant_values=1).astype(bool)
    ends: list[float] = (states[jumps] * STEP_S).tolist()
    return ends


def warped(costs: Array) -> tuple[Array, Array]:
    """Return the cheapest monotone path from the first to the last corner: row and column of each step.

    costs: [rows, columns]. Row by row; within a row the sum from the left is sequential.
    """
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    came = np.full((rows + 1, columns + 1), -1, dtype=np.int8)
    total[0, 0] = 0
    # A cell depends on its left, upper and diagonal neighbours: cells of one antidiagonal do not depend on each other.
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        both, up, left = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
        choice = np.where((both < up) & (both < left), 0, np.where((up < both) & (up < left), 1, 2))
        best = np.choose(choice, [both, up, left])
        total[row, column] = costs[row - 1, column - 1] + best
        came[row, column] = choice
    came[0, :], came[:, 0] = 2, 1
    path, row, column = [], rows, columns
    while row > 0 or column > 0:
        path.append((row - 1, column - 1))
        step = came[row, column]
        row, column = row - int(step != 2), column - int(step != 1)
    steps = np.array(path[::-1])
    return steps[:, 0], steps[:, 1]


def words(
    ids: Sequence[int], ends: Sequence[float], bytes_of: Callable[[int], bytes], language: str = "en"
) -> list[Word]:
    """Return the words of a segment.

    ids: of the segment, timestamps included. ends: seconds at which the id before the first ends, then each of them.
    """
    found: list[Word] = []
    data, start = b"", ends[0]
    for number, (id, end) in enumerate(zip(ids, ends[1:], strict=True)):
        piece = bytes_of(id)
        if not piece:
            continue
        begins = piece.startswith(b" ") or (language in UNSPACED and _is_whole(data))
        if begins and data:
            found.append(Word(text=data.decode(errors="replace").strip(), start_s=start, end_s=ends[number]))
            data = b""
        if not data:
            start = ends[number]
        data += piece
        last = end
    if data:
        found.append(Word(text=data.decode(errors="replace").strip(), start_s=start, end_s=last))
    return [word for word in found if word.text]


def _is_whole(data: bytes) -> bool:
    """Return whether bytes end with a whole character."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
