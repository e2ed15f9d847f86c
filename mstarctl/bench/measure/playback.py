"""Playback simulation: the gaps that a listener would hear if chunks were played as they arrive."""

from __future__ import annotations

from collections.abc import Sequence


def silences(marks: Sequence[float], lengths: Sequence[float], buffer_s: float = 0.0) -> list[float]:
    """Return the seconds of each gap in the playback of a stream; empty if the buffer never runs dry.

    marks: arrival times of the chunks in seconds, ascending. lengths: their seconds of audio. Playback starts
    `buffer_s` after the first chunk and pauses when the buffer is empty. It resumes when `buffer_s` of audio is there,
    or the stream has ended.
    """
    if len(marks) != len(lengths):
        raise ValueError(f"{len(marks)} arrivals and {len(lengths)} lengths")
    if not marks:
        return []
    gaps = []
    empty_at = marks[0] + buffer_s  # the time at which the received audio has been played
    stopped_at: float | None = None
    held_s = 0.0  # audio that waits while playback is stopped
    for number, (mark, length) in enumerate(zip(marks, lengths, strict=True)):
        if stopped_at is None and mark > empty_at:
            stopped_at, held_s = empty_at, 0.0
        if stopped_at is None:
            empty_at += length
            continue
        held_s += length
        if held_s >= buffer_s or number == len(marks) - 1:
            gaps.append(mark - stopped_at)
            empty_at, stopped_at = mark + held_s, None
    return gaps
