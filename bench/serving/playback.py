"""Playback simulation: the gaps that a listener would hear if chunks were played as they arrive."""

from __future__ import annotations

from collections.abc import Sequence


def dry_moments(marks: Sequence[float], lengths: Sequence[float], start_buffer_s: float = 0.0) -> list[float]:
    """Seconds of each silence in the middle of a stream; empty when playback never runs dry.

    marks: when each chunk came, in seconds, ascending. lengths: seconds of sound of each. Playback begins
    `start_buffer_s` after the first chunk, stops when nothing is left, and goes on as soon as the next chunk comes.
    """
    if len(marks) != len(lengths):
        raise ValueError(f"{len(marks)} arrivals and {len(lengths)} lengths")
    if not marks:
        return []
    dry = []
    empty_at = marks[0] + start_buffer_s  # when what has come so far is played to its end
    for mark, length in zip(marks, lengths, strict=True):
        if mark > empty_at:
            dry.append(mark - empty_at)
            empty_at = mark
        empty_at += length
    return dry
