"""Times of other hosts on the supervisor's clock, whatever the delay of single messages and the drift of clocks."""

from __future__ import annotations

import pytest

from mstar_core.messages.life import Telemetry
from mstar_core.messages.telemetry import RequestNews, Span
from mstar_core.supervisor.clock_shift import WINDOW_S, ClockShift


def sent(at: float) -> Telemetry:
    """Return what a process sends at a time of its clock, about the second before."""
    span = Span(1, 7, "compute", "LLM", "decode", at - 1.0, at - 0.5)
    return Telemetry(
        name="worker-1", incarnation=1, at=at, requests=[RequestNews(handle=7, started=at - 1.0)], spans=[span]
    )


def test_times_are_those_of_the_supervisor_up_to_the_least_delay() -> None:
    clock, ahead = ClockShift(), 5000.0
    clock.shifted(sent(100.0 + ahead), 100.002)
    late = clock.shifted(sent(101.0 + ahead), 101.9)  # 0.9 s on its way
    assert late.requests[0].started == pytest.approx(100.002) and late.requests[0].ended is None
    assert (late.spans[0].start, late.spans[0].end) == (pytest.approx(100.002), pytest.approx(100.502))
    assert late.at == pytest.approx(101.002)


def test_a_drift_of_the_clocks_is_followed() -> None:
    clock = ClockShift()
    for second in range(int(5 * WINDOW_S)):
        now, at = float(second), second * (1 - 1e-3)  # the other clock loses a millisecond in each second
        shifted = clock.shifted(sent(at), now)
    assert shifted.at == pytest.approx(now, abs=2.1 * WINDOW_S * 1e-3)
