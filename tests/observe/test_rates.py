"""Rates of counters, and quantiles over one minute."""

from __future__ import annotations

import pytest

from mstar_core.observe.rates import Minute, Rate, quantiles


def test_a_rate_is_growth_over_about_a_second() -> None:
    rate = Rate()
    assert rate.at(0.0, 100.0) == 0.0
    for step in range(1, 41):
        actual = rate.at(step * 0.25, 100.0 + step * 5)
    assert actual == pytest.approx(20.0)
    for step in range(41, 50):
        actual = rate.at(step * 0.25, 300.0)
    assert actual == 0.0


def test_a_counter_that_fell_restarts_its_rate() -> None:
    rate = Rate()
    rate.at(0.0, 100.0)
    assert rate.at(1.0, 4.0) == 0.0
    assert rate.at(2.0, 6.0) == pytest.approx(2.0)


def test_frequent_readings_keep_few_samples() -> None:
    rate = Rate()
    for step in range(10_000):
        actual = rate.at(step / 1000, step)
    assert actual == pytest.approx(1000, rel=0.1)
    assert len(rate._samples) < 40


def test_quantiles_are_recorded_values() -> None:
    assert quantiles([3.0, 1.0, 2.0], 0.0, 0.5, 1.0) == (1.0, 2.0, 3.0)
    assert quantiles([], 0.5) == (None,)


def test_a_minute_drops_older_values() -> None:
    minute = Minute()
    minute.add(0.0, 9.0)
    minute.add(50.0, 1.0)
    assert minute.quantiles(59.0, 1.0) == (9.0,)
    assert minute.quantiles(70.0, 1.0) == (1.0,)
