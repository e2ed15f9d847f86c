"""Ticks: periodic work of several loops is due at the same times of the monotonic clock."""

from __future__ import annotations

import pytest

from mstar_core.ticks import LEAST, next_tick


@pytest.mark.parametrize("period_s", [0.1, 0.2, 1.0, 2.0])
def test_loops_that_begin_at_different_times_are_due_together(period_s: float) -> None:
    times = [(400.2 + 0.29 * number) * period_s for number in range(3)]
    due = [next_tick(now, period_s) for now in times]
    assert due == pytest.approx([due[0]] * 3)
    assert due[0] / period_s == pytest.approx(round(due[0] / period_s))


@pytest.mark.parametrize("early_s", [0.0, 1e-9, 0.05, -1e-9, -0.3])
def test_a_timer_that_runs_early_or_late_does_not_run_twice(early_s: float) -> None:
    assert next_tick(50.0 - early_s, 1.0) == pytest.approx(51.0)


def test_a_tick_always_lies_ahead() -> None:
    for number in range(1000):
        now = number * 0.0137
        assert LEAST * 0.2 <= next_tick(now, 0.2) - now + 1e-9 <= 0.2 * (1 + LEAST) + 2e-9
