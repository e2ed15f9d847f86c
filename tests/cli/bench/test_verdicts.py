"""Verdicts on simulated pairs of runs, and what refuses a comparison."""

from __future__ import annotations

import numpy as np
import pytest

from mstar_core.errors import UsageError
from mstarctl.bench.compare import order_of, parse_thresholds
from mstarctl.bench.measure.verdicts import RunSamples, compared, few_groups, runs_needed, verdict_of


def simulated(chance: np.random.Generator, factor: float, runs: int, requests: int = 240) -> list[RunSamples]:
    """Runs of 60 s whose latencies are log-normal, with a queue that lasts for seconds and noise of 2 % per run."""
    found = []
    for _ in range(runs):
        noise = factor * np.exp(chance.normal(0.0, 0.02))
        values = [
            np.sort(200 * noise * np.exp(chance.normal(0.0, 0.25, requests // 12) + abs(chance.normal(0.0, 0.05))))
            for _ in range(12)
        ]
        counts = np.full(12, requests / 12)
        found.append(RunSamples(values={"ttft": values}, succeeded=counts, good=counts, span_s=60.0, has_goals=False))
    return found


def verdicts(seed: int, factor: float, runs: int) -> dict[str, str]:
    chance = np.random.default_rng(seed)
    base, changed = simulated(chance, 1.0, runs), simulated(chance, factor, runs)
    rows = compared(base, changed, thresholds={}, resamples=400)
    return {row.name: row.verdict for row in rows}


@pytest.mark.parametrize("runs", [1, 5])
def test_a_against_a_has_no_difference_in_95_of_100_pairs(runs: int) -> None:
    found = [verdicts(seed, 1.0, runs) for seed in range(100)]
    calm = sum(not {"better", "worse"}.intersection(each.values()) for each in found)
    assert calm >= 95


def test_a_shift_of_a_tenth_is_found_in_90_of_100_pairs() -> None:
    found = [verdicts(1000 + seed, 1.1, 5) for seed in range(100)]
    assert sum(each["p50.ttft"] == "worse" for each in found) >= 90
    assert {each["throughput"] for each in found} == {"same"}


def test_percentiles_of_few_samples_have_no_verdict() -> None:
    assert verdicts(0, 1.0, 1)["p99.ttft"] == "too few"
    assert verdicts(0, 1.0, 5)["p99.ttft"] != "too few"


@pytest.mark.parametrize(
    ("low", "high", "is_better_high", "verdict"),
    [
        (-0.02, 0.03, False, "same"), (0.08, 0.12, False, "worse"), (0.08, 0.12, True, "better"),
        (-0.12, -0.08, False, "better"), (-0.1, 0.2, False, "unclear"), (0.01, 0.06, False, "unclear"),
    ],
)  # fmt: skip
def test_an_interval_has_one_verdict(low: float, high: float, is_better_high: bool, verdict: str) -> None:
    assert verdict_of(low, high, 0.05, is_better_high=is_better_high) == verdict


def test_an_unclear_verdict_says_how_many_runs_it_needs() -> None:
    assert runs_needed(-0.08, 0.08, 0.05, 5) == 13
    assert few_groups(5) == pytest.approx(2.776 / 1.96 * 1.118, rel=0.03)


def test_runs_are_interleaved_in_alternating_direction() -> None:
    assert "".join(order_of(3)) == "ABBAAB"


def test_thresholds_name_percentiles_of_known_metrics() -> None:
    assert parse_thresholds(["p99.ttft=5%", "goodput=0.1"]) == {"p99.ttft": 0.05, "goodput": 0.1}
    for text in ("p98.ttft=5%", "p99.tfft=5%", "ttft=5%", "p99.ttft", "p99.ttft=x"):
        with pytest.raises(UsageError):
            parse_thresholds([text])
