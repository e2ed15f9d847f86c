"""Control loop of `call --rate`, with a fake clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mstar_core.conformance.clock import FakeClock
from mstar_core.errors import Overloaded, Unreachable
from mstarctl.call.pace import Paced, keep_pace


def run(rate: float, ticks: int, took: Iterator[float | Exception], told: list[int] | None = None) -> Paced:
    clock, told = FakeClock(), [] if told is None else told

    def send(skipped: int) -> None:
        told.append(skipped)
        step = next(took)
        if isinstance(step, Exception):
            clock.now += 0.001
            raise step
        clock.now += step

    return keep_pace(rate, ticks, send, clock=clock, sleep=clock.sleep)


def test_answers_within_the_period_miss_nothing() -> None:
    paced = run(10, 20, iter([0.02] * 20))
    assert (paced.sent, paced.missed, paced.ticks) == (20, 0, 20)
    assert paced.quantile_s(0.5) == pytest.approx(0.02) and paced.gap_s == pytest.approx(0.1)
    assert paced.total_s == pytest.approx(1.92)


def test_a_slow_answer_is_late_and_the_ticks_behind_it_are_skipped() -> None:
    paced = run(10, 6, iter([0.02, 0.25, 0.02, 0.02]))
    assert (paced.sent, paced.late, paced.skipped, paced.ticks) == (4, 1, 2, 6)
    assert paced.missed == 3
    assert paced.gap_s == pytest.approx(0.33)


def test_each_request_reports_the_ticks_that_were_skipped_before_it() -> None:
    told: list[int] = []
    paced = run(10, 6, iter([0.02, 0.25, 0.02, 0.02]), told)
    assert told == [0, 0, 2, 0] and sum(told) == paced.skipped


def test_when_nothing_is_in_time_every_tick_is_missed() -> None:
    paced = run(100, 10, iter([0.035] * 3))
    assert (paced.sent, paced.late, paced.skipped, paced.ticks, paced.missed) == (3, 3, 7, 10, 10)


def test_later_failures_are_counted_by_code_and_the_first_is_raised() -> None:
    paced = run(10, 4, iter([0.01, Overloaded("full"), 0.01, Overloaded("full")]))
    assert (paced.failed, paced.missed, paced.errors) == (2, 2, {"queue_full": 2})
    with pytest.raises(Unreachable):
        run(10, 4, iter([Unreachable("nobody")]))


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_a_quantile_is_an_answer_that_was_measured(share: float, expected: float) -> None:
    assert Paced(rate_hz=1, latencies_s=[4.0, 1.0, 3.0, 2.0]).quantile_s(share) == expected
    assert Paced(rate_hz=1).quantile_s(share) is None


def test_what_is_shown_comes_after_every_tick() -> None:
    seen: list[int] = []
    clock = FakeClock()
    show: Callable[[Paced], None] = lambda paced: seen.append(paced.ticks)  # noqa: E731  one expression
    keep_pace(10, 3, lambda skipped: clock.sleep(0.15), clock=clock, sleep=clock.sleep, show=show)
    assert seen == [2, 3]
