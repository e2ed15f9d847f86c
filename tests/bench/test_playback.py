"""Gaps in simulated playback."""

from __future__ import annotations

import pytest

from bench.serving.playback import dry_moments

CHUNK = 0.1


@pytest.mark.parametrize(
    ("marks", "buffer_s", "dry"),
    [
        ([], 0.0, []),
        ([5.0], 0.0, []),
        ([0.0, 0.1, 0.2], 0.0, []),  # each just in time
        ([0.0, 0.01, 0.02, 0.3], 0.0, []),  # what came early lasts until the late one
        ([0.0, 0.13, 0.2], 0.0, [0.03]),  # late once; the silence has shifted everything after it
        ([0.0, 0.13, 0.27], 0.0, [0.03, 0.04]),
        ([0.0, 0.13, 0.27], 0.1, []),  # a start buffer covers both
        ([0.0, 0.25], 0.1, [0.05]),
        ([3.0, 3.35], 0.1, [0.15]),
    ],
)
def test_silences(marks: list[float], buffer_s: float, dry: list[float]) -> None:
    assert dry_moments(marks, [CHUNK] * len(marks), buffer_s) == pytest.approx(dry)


def test_a_longer_buffer_never_gives_more_silence() -> None:
    marks = [0.0, 0.05, 0.3, 0.34, 0.6, 0.75, 0.76, 1.2]
    sums = [sum(dry_moments(marks, [CHUNK] * 8, buffer_s)) for buffer_s in (0.0, 0.05, 0.1, 0.3, 0.6)]
    assert sums == sorted(sums, reverse=True) and sums[0] > 0 and sums[-1] == 0


def test_every_arrival_has_a_length() -> None:
    with pytest.raises(ValueError, match="2 arrivals and 1 lengths"):
        dry_moments([0.0, 1.0], [CHUNK])
