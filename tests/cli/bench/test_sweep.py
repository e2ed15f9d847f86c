"""The rate of work of a sweep's points, by which it finds the peak."""

from __future__ import annotations

import pytest

from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.sweep import work_rate

RATE = 20.0


def answered(number: int, end_s: float, status: str = "ok") -> Outcome:
    return Outcome(
        index=number, phase=0, client=0, id=str(number), due_s=0.0, sent_s=0.0, headers_s=0.0, end_s=end_s,
        status=status, http_status=200,
    )  # fmt: skip


@pytest.mark.parametrize("clients", [64, 256])
def test_requests_that_wait_behind_each_other_do_not_raise_the_rate(clients: int) -> None:
    found = work_rate([answered(number, (number + 1) / RATE) for number in range(clients)], 0.0)
    assert found == pytest.approx(RATE)


def test_refused_requests_are_no_work() -> None:
    refused = [answered(100 + number, 0.001 * number, "http_429") for number in range(1000)]
    assert work_rate([*(answered(number, (number + 1) / RATE) for number in range(40)), *refused], 0.0) == RATE
    assert work_rate(refused, 0.0) == 0.0


def test_requests_that_ended_before_the_window_are_no_work_in_it() -> None:
    assert work_rate([answered(0, 1.0), answered(1, 3.0)], 2.0) == 1.0
