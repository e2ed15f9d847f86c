"""Windows of a recording, in frames: one behind the other, or around its speech. Used by processor and program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

LEAST: Final = 40
"""Frames of the rest of a window around speech that may hold a word: speech has a margin of half as many."""

Window = tuple[int, int]
"""First frame and number of frames."""


def around(spans: Iterable[tuple[int, int]], most: int) -> list[Window]:
    """Return windows that hold as many spans as fit into each; longer spans are divided.

    spans: first frame and end of each part with speech, ascending. most: frames of a window.
    """
    found = list[Window]()
    for first, last in spans:
        if found and last - found[-1][0] <= most:
            found[-1] = (found[-1][0], last - found[-1][0])
        else:
            found += [(at, min(most, last - at)) for at in range(first, last, most)]
    return found


def next_window(at: int, frames: int, most: int, windows: Sequence[Window] | None) -> Window | None:
    """Return the window at or behind frame `at`, None at the end.

    frames: of the recording. windows: around speech; None if they follow each other.
    """
    if windows is None:
        return (at, min(frames - at, most)) if at < frames else None
    ahead = ((max(at, first), first + count) for first, count in windows)
    return next(((first, end - first) for first, end in ahead if end - first >= LEAST), None)
