"""Windows of a recording: around its speech, and one behind the other."""

from __future__ import annotations

import pytest

from mstar_whisper.windows import LEAST, around, next_window

MOST = 100


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([(10, 30), (50, 110)], [(10, 100)]),
        ([(10, 30), (50, 111)], [(10, 20), (50, 61)]),
        ([(5, 255)], [(5, 100), (105, 100), (205, 50)]),
    ],
)
def test_a_window_holds_as_many_parts_of_speech_as_fit(
    spans: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    assert around(spans, MOST) == expected


def test_windows_follow_each_other_up_to_the_end() -> None:
    found = [next_window(at, 130, MOST, None) for at in (0, 60, 100, 130)]
    assert found == [(0, 100), (60, 70), (100, 30), None]


def test_the_rest_of_a_window_around_speech_is_dropped_if_it_is_too_short_for_a_word() -> None:
    windows = [(10, 90), (200, 80)]
    found = [next_window(at, 300, MOST, windows) for at in (0, 100 - LEAST, 101 - LEAST, 241)]
    assert found == [(10, 90), (100 - LEAST, LEAST), (200, 80), None]
