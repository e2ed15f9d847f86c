"""Playback simulation: the gaps that a listener would hear if chunks were played as they arrive."""

from __future__ import annotations

from collections.abc import Sequence


def dry_moments(marks: Sequence[float], lengths: Sequence[float], start_buffer_s: float = 0.0) -> list[float]:
    """Return the seconds of each gap in the playback of a stream; empty if the buffer never runs dry.

    marks: arrival times of the chunks in seconds, ascending. lengths: their seconds of audio. Playback starts
    `start_buffer_s` after the first chunk, pauses if the buffer is empty, and resumes with the next chunk.
    """
    if len(marks) != len(lengths):
        raise ValueError(f"{len(marks)} arrivals and {len(lengths)} lengths")
    if not marks:
        return []
    dry = []
    empty_at = marks[0] + start_buffer_s  # the time at which the received audio has been played
    for mark, length in zip(marks, lengths, strict=True):
        if mark > empty_at:
            dry.append(mark - empty_at)
            empty_at = mark
        empty_at += length
    return dry
