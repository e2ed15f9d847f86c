"""Figures of a killed worker as a client sees them: pause and underruns of a stream."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu_restart import RATE, Player, largest_correlation, pause_s
from bench.serving.client import Heard


def stream(*marks: float, chunk_s: float = 1.0) -> Heard:
    return Heard(marks=list(marks), samples=[round(chunk_s * RATE)] * len(marks))


def test_a_pause_is_the_longest_gap_that_ends_after_the_kill() -> None:
    heard = stream(0.0, 3.0, 3.5, 7.5, 8.0)
    assert pause_s(heard, 3.4) == 4.0 and pause_s(heard, 2.0) == 4.0 and pause_s(heard, 7.6) == 0.5
    assert pause_s(heard, 9.0) is None, "it had ended"


@pytest.mark.parametrize(
    ("buffer_s", "underruns", "stalled_s"), [(1.0, 1, 1.5), (2.0, 1, 1.0), (3.0, 1, 0.5), (4.0, 0, 0.0)]
)
def test_a_player_runs_dry_if_its_buffer_is_shorter_than_the_pause(
    buffer_s: float, underruns: int, stalled_s: float
) -> None:
    heard = stream(0.0, 0.5, 1.0, 4.5, 5.0, 5.5)
    player = Player.of(heard, buffer_s)
    assert (player.underruns, player.stalled_s) == (underruns, stalled_s)


def test_samples_that_come_twice_are_found_and_others_not() -> None:
    rng = np.random.default_rng(3)
    sound = rng.normal(size=5000)
    assert largest_correlation(sound[700:1700], sound) == 1.0
    assert abs(largest_correlation(rng.normal(size=1000), sound)) < 0.3
    assert largest_correlation(sound[:10], sound[:5]) == 0.0
