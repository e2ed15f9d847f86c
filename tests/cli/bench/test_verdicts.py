"""Verdicts on simulated pairs of runs, and what refuses a comparison."""

from __future__ import annotations

import numpy as np
import pytest

from mstar_core.errors import UsageError
from mstarctl.bench.compare import order_of, parse_thresholds
from mstarctl.bench.measure.load_metrics import Measures
from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.measure.verdicts import (
    Compared,
    RunSamples,
    compared,
    few_groups,
    prepared,
    runs_needed,
    verdict_of,
)
from mstarctl.bench.measure.window import MeasuredWindow, summarised


def simulated(chance: np.random.Generator, factor: float, runs: int, requests: int = 240) -> list[RunSamples]:
    """Runs of 60 s whose latencies are log-normal, with a queue that lasts for seconds and noise of 2 % per run."""
    runs_of_side = []
    for _ in range(runs):
        noise = factor * np.exp(chance.normal(0.0, 0.02))
        values = [
            np.sort(200 * noise * np.exp(chance.normal(0.0, 0.25, requests // 12) + abs(chance.normal(0.0, 0.05))))
            for _ in range(12)
        ]
        counts = np.full(12, requests / 12)
        runs_of_side.append(
            RunSamples(values={"ttft": values}, succeeded=counts, good=counts, span_s=60.0, has_goals=False)
        )
    return runs_of_side


def verdicts(seed: int, factor: float, runs: int) -> dict[str, str]:
    chance = np.random.default_rng(seed)
    base, changed = simulated(chance, 1.0, runs), simulated(chance, factor, runs)
    rows = compared(base, changed, thresholds={}, resamples=400)
    return {row.name: row.verdict for row in rows}


@pytest.mark.parametrize("runs", [1, 5])
def test_a_against_a_has_no_difference_in_95_of_100_pairs(runs: int) -> None:
    actual = [verdicts(seed, 1.0, runs) for seed in range(100)]
    calm = sum(not {"better", "worse"}.intersection(by_metric.values()) for by_metric in actual)
    assert calm >= 95


def test_a_shift_of_a_tenth_is_found_in_90_of_100_pairs() -> None:
    actual = [verdicts(1000 + seed, 1.1, 5) for seed in range(100)]
    assert sum(by_metric["p50.ttft"] == "worse" for by_metric in actual) >= 90
    assert {by_metric["throughput"] for by_metric in actual} == {"same"}


def test_percentiles_of_few_samples_have_no_verdict() -> None:
    assert verdicts(0, 1.0, 1)["p99.ttft"] == "too few"
    assert verdicts(0, 1.0, 5)["p99.ttft"] != "too few"


@pytest.mark.parametrize(
    ("low", "high", "is_better_high", "verdict"),
    [
        (-0.02, 0.03, False, "same"),
        (0.08, 0.12, False, "worse"),
        (0.08, 0.12, True, "better"),
        (-0.12, -0.08, False, "better"),
        (-0.1, 0.2, False, "unclear"),
        (0.01, 0.06, False, "unclear"),
    ],
)
def test_an_interval_has_one_verdict(low: float, high: float, is_better_high: bool, verdict: str) -> None:
    assert verdict_of(low, high, 0.05, is_better_high=is_better_high) == verdict


def ok(end_s: float, due_s: float, status: str = "ok") -> Outcome:
    return Outcome(
        index=round(1000 * due_s),
        phase=1,
        client=0,
        id=f"b-{due_s}",
        due_s=due_s,
        sent_s=due_s,
        headers_s=due_s,
        end_s=end_s,
        status=status,
        http_status=200,
        requested=("text",),
    )


WINDOW = MeasuredWindow(start_s=0.0, end_s=10.0)
MEASURES = Measures(is_late=True)


def side(outcomes: list[Outcome]) -> RunSamples:
    return prepared(outcomes, WINDOW, MEASURES, [])


def row_of(base: list[Outcome], changed: list[Outcome], name: str) -> Compared:
    return {row.name: row for row in compared([side(base)], [side(changed)], thresholds={}, resamples=400)}[name]


def test_a_comparison_has_the_throughput_of_the_run() -> None:
    """Requests that end beyond the window count for neither, whenever they were due."""
    outcomes = [ok(due + 6.0, due) for due in np.arange(0.0, 10.0, 0.5)]
    told = summarised(outcomes, WINDOW, MEASURES, [])["metrics"]["throughput"]["value"]
    assert row_of(outcomes, outcomes, "throughput").base == pytest.approx(told) == pytest.approx(0.8)


def test_nothing_against_nothing_is_the_same() -> None:
    none = [ok(20.0, due) for due in np.arange(0.0, 10.0, 0.5)]
    row = row_of(none, none, "throughput")
    assert (row.base, row.changed, row.difference, row.low, row.high, row.verdict) == (0, 0, 0, 0, 0, "same")


def test_no_rate_falls_by_more_than_all_of_it() -> None:
    few, none = [ok(9.5, 0.0), ok(9.9, 1.0)], [ok(20.0, 0.0)]
    row = row_of(few, none, "throughput")
    assert row.low == -1.0 and row.difference == -1.0
    assert row.runs_needed == 0, "an interval that is cut off at -100 % says nothing about the runs that are needed"
    rising = row_of(none, few, "throughput")
    assert (rising.difference, rising.verdict) == (None, "unclear")


def test_requests_that_were_cut_count_in_a_comparison() -> None:
    """A side whose slow requests timed out must not look fast."""
    whole = [ok(due + 0.1, due) for due in np.arange(0.0, 10.0, 0.1)]
    cut = [
        ok(due + 5.0, due, "timeout") if n % 3 else ok(due + 0.05, due)
        for n, due in enumerate(np.arange(0.0, 10.0, 0.1))
    ]
    row = row_of(whole, cut, "p50.latency")
    assert row.changed == pytest.approx(5000.0) and row.verdict == "worse"
    assert row_of(cut, whole, "p50.latency").verdict == "better"
    assert row_of(cut, cut, "p50.latency").verdict == "unclear", "both values are only lower limits"


def test_an_unclear_verdict_says_how_many_runs_it_needs() -> None:
    assert runs_needed(-0.08, 0.08, 0.05, 5) == 13
    assert runs_needed(-0.9, 0.9, 0.05, 2) == 0, "hundreds of runs are out of reach"
    assert few_groups(5) == pytest.approx(2.776 / 1.96 * 1.118, rel=0.03)


def test_runs_are_interleaved_in_alternating_direction() -> None:
    assert "".join(order_of(3)) == "ABBAAB"


def test_thresholds_name_percentiles_of_known_metrics() -> None:
    assert parse_thresholds(["p99.ttft=5%", "goodput=0.1"]) == {"p99.ttft": 0.05, "goodput": 0.1}
    for text in ("p98.ttft=5%", "p99.tfft=5%", "ttft=5%", "p99.ttft", "p99.ttft=x"):
        with pytest.raises(UsageError):
            parse_thresholds([text])
