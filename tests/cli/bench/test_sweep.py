"""Sweeps: the rate of work of their points, by which they find the peak, and the knee."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from mstar_core.errors import ConfigError
from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.result import SWEEP
from mstarctl.bench.show.display import Display
from mstarctl.bench.show.plot import sweep_facts
from mstarctl.bench.sweep import MakeOptions, Sweep, SweepPoint, work_rate
from mstarctl.bench.target import BenchTarget

RATE = 20.0


def answered(number: int, end_s: float, status: str = "ok") -> Outcome:
    return Outcome(
        index=number,
        phase=0,
        client=0,
        id=str(number),
        due_s=0.0,
        sent_s=0.0,
        headers_s=0.0,
        end_s=end_s,
        status=status,
        http_status=200,
    )


@pytest.mark.parametrize("clients", [64, 256])
def test_requests_that_wait_behind_each_other_do_not_raise_the_rate(clients: int) -> None:
    actual = work_rate([answered(number, (number + 1) / RATE) for number in range(clients)], 0.0)
    assert actual == pytest.approx(RATE)


def test_refused_requests_are_no_work() -> None:
    refused = [answered(100 + number, 0.001 * number, "http_429") for number in range(1000)]
    assert work_rate([*(answered(number, (number + 1) / RATE) for number in range(40)), *refused], 0.0) == RATE
    assert work_rate(refused, 0.0) == 0.0


def test_requests_that_ended_before_the_window_are_no_work_in_it() -> None:
    assert work_rate([answered(0, 1.0), answered(1, 3.0)], 2.0) == 1.0


PEAK = 20.0
"""Peak by the closed loops of the fake server, in requests per second."""


class Point(SweepPoint):
    def work_rate(self) -> float:
        return PEAK


class Limited(Sweep):
    """A sweep of a server that meets the goal up to a rate."""

    def __init__(self, limit: float, folder: Path, *, latency_ms: float = 100.0, span_s: float = 30.0) -> None:
        super().__init__(
            cast(BenchTarget, None),
            cast(MakeOptions, None),
            folder,
            Display("plain", is_coloured=False),
            knee=0.95,
            slo="ttfa<250ms",
            span_s=span_s,
        )
        self.limit, self.latency_ms = limit, latency_ms

    def _run(self, load: float, *, is_open: bool) -> SweepPoint:
        goodput = load if not is_open or load <= self.limit else 0.5 * load
        metrics = {"goodput": {"value": goodput}, "offered": {"value": load}, "latency": {"p50": self.latency_ms}}
        facts = {"metrics": metrics, "is_over_saturated": False}
        point = Point(load=load, is_open=is_open, facts=facts, folder=self._out)
        self.points.append(point)
        return point


@pytest.mark.parametrize("limit", [0.3 * PEAK, 0.95 * PEAK, 1.5 * PEAK, 2.5 * PEAK])
def test_the_knee_is_found_within_five_percent_below_and_above_the_peak(limit: float, tmp_path: Path) -> None:
    sweep = Limited(limit, tmp_path)
    sweep.auto(2)
    assert sweep.knee is not None and 0.95 * limit <= sweep.knee.load <= limit
    assert max(point.load for point in sweep.points if point.is_open) > limit


@pytest.mark.parametrize("is_open", [True, False])
def test_points_of_short_windows_are_told(is_open: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Limited(PEAK, tmp_path, latency_ms=14_000.0, span_s=12.0)
    sweep.fixed([1.0, 2.0], is_open=is_open)
    assert "windows of 12 s are short for requests of 14 s" in " ".join(capsys.readouterr().err.split())
    assert sweep.warnings
    calm = Limited(PEAK, tmp_path, latency_ms=1_400.0, span_s=12.0)
    calm.fixed([1.0, 2.0], is_open=is_open)
    assert not calm.warnings


def test_windows_shorter_than_three_requests_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Limited(PEAK, tmp_path, latency_ms=3300.0, span_s=5.0).auto(2)
    assert "windows of 5 s are short for requests of 3.3 s" in " ".join(capsys.readouterr().err.split())
    Limited(PEAK, tmp_path, latency_ms=1500.0, span_s=5.0).auto(2)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", '{"points": 3}', "{"])
def test_a_damaged_sweep_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / SWEEP).write_text(text)
    with pytest.raises(ConfigError) as damaged:
        sweep_facts(tmp_path)
    assert "sweep.json is not a sweep" in damaged.value.title
