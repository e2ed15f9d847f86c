"""Arrival times: their distribution, ramps, ticks, traces and refused words."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from mstar_core.errors import UsageError
from mstarctl.bench.load.arrivals import Arrivals, replayed, schedule, ticks


def gaps_of(kind: str, rate: float = 4.0, count: int = 20_000) -> list[float]:
    times = [0.0, *schedule(Arrivals.parse(kind, rate), 7, count=count)]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize(("kind", "variation"), [("poisson", 1.0), ("gamma:0.5", 2**0.5), ("gamma:4", 0.5)])
def test_gaps_have_the_mean_and_the_variation_of_their_process(kind: str, variation: float) -> None:
    gaps = gaps_of(kind)
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.03)
    assert deviation / mean == pytest.approx(variation, rel=0.04)


def test_poisson_gaps_are_exponential() -> None:
    gaps = sorted(gaps_of("poisson"))
    distance = max(abs((n + 1) / len(gaps) - (1 - math.exp(-4 * gap))) for n, gap in enumerate(gaps))
    assert distance < 1.63 / len(gaps) ** 0.5  # Kolmogorov-Smirnov at 1 %


def test_constant_gaps_are_exact() -> None:
    assert schedule(Arrivals.parse("constant", 4.0), 0, count=4) == [0.25, 0.5, 0.75, 1.0]


def test_a_seed_gives_one_schedule() -> None:
    poisson = Arrivals.parse("poisson", 9.0)
    assert schedule(poisson, 3, span_s=5.0) == schedule(poisson, 3, span_s=5.0)
    assert schedule(poisson, 3, span_s=5.0) != schedule(poisson, 4, span_s=5.0)


def test_a_ramp_rises_linearly_and_comes_on_top() -> None:
    times = schedule(Arrivals.parse("constant", 100.0), 0, count=50, ramp_s=10.0)
    assert sum(at >= 10.0 for at in times) == 50
    assert sum(at < 10.0 for at in times) == pytest.approx(500, abs=1)
    assert sum(at < 5.0 for at in times) == pytest.approx(125, abs=1)


def test_a_trace_starts_at_zero_and_is_sped_up() -> None:
    assert replayed([3.0, 4.0, 8.0], 2.0) == [0.0, 0.5, 2.5]
    with pytest.raises(UsageError, match="decrease"):
        replayed([3.0, 2.0], 1.0)


def test_ticks_of_clients_are_spread_over_a_period() -> None:
    assert ticks(0.5, 2, 1.0) == [[0.0, 0.5], [0.25, 0.75]]


@pytest.mark.parametrize("text", ["poison", "gamma", "gamma:-1", "constant:3"])
def test_unknown_arrivals_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Arrivals.parse(text, 1.0)


def test_gamma_of_shape_one_draws_like_poisson() -> None:
    gap = next(Arrivals.parse("gamma:1", 2.0).gaps(random.Random(1)))
    assert gap > 0
