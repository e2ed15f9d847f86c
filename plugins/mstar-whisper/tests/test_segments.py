"""Segments of a window's ids: where they are cut, and where the next window starts."""

from __future__ import annotations

import pytest

from mstar_whisper.text.segments import compression, split

T = 100
"""Id of the first timestamp."""


@pytest.mark.parametrize(
    ("ids", "spans", "step"),
    [
        ([1, 2], [(0, 2, 0.0, 1.0)], 100),
        ([T, 1, T + 10], [(0, 3, 0.0, 0.2)], 100),
        ([T, 1, T + 10, T + 20, 2], [(0, 4, 0.0, 0.2)], 20),
        ([T, 1, T + 10, T + 20, 2, T + 30], [(0, 3, 0.0, 0.2), (3, 6, 0.4, 0.6)], 100),
        ([T, 1, T + 10, T + 10], [(0, 4, 0.0, 0.2)], 20),
    ],
)
def test_texts_between_timestamps_are_segments(
    ids: list[int], spans: list[tuple[int, int, float, float]], step: int
) -> None:
    found, frames = split(ids, T, 100)
    assert [(one.first, one.last, pytest.approx(one.start_s), pytest.approx(one.end_s)) for one in found] == spans
    assert frames == step


def test_repetition_compresses_well() -> None:
    assert compression([7] * 200, 51866) > 10 > compression(list(range(200)), 51866)
