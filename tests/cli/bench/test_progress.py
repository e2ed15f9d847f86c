"""Progress of a run: the warm-up, what is left of it, and warnings of windows that are too short."""

from __future__ import annotations

from typing import Any

import pytest

from mstarctl.bench.client.wire import Counters
from mstarctl.bench.load.plan import Load
from mstarctl.bench.measure.load_metrics import Measures
from mstarctl.bench.null_server import NullBehaviour
from mstarctl.bench.options import WARM_UP_S, load_of
from mstarctl.bench.run import short_window
from mstarctl.bench.show.display import plain_line
from mstarctl.bench.show.live import LiveState, live_lines
from tests.cli.bench.conftest import NullRun
from tests.cli.bench.test_incidents import ended

WORDS: dict[str, Any] = {
    "rate": "4",
    "concurrency": None,
    "trace": None,
    "duration": None,
    "requests": None,
    "cancel_rate": None,
    "arrivals": "poisson",
    "speed": 1.0,
    "ramp": None,
    "think": None,
    "period": None,
    "seed": 0,
}


def warming(done: int, elapsed_s: float, in_flight: int = 12, limit_s: float = 0.0) -> LiveState:
    state = LiveState(
        title="tts-short",
        load="12 clients",
        measures=Measures(is_late=False),
        goals=(),
        total=0,
        span_s=30.0,
        warm_total=20,
        warm_limit_s=limit_s,
        elapsed_s=elapsed_s,
    )
    state.warm["ok"] = done
    state.counters[0] = Counters(0, 0, done + in_flight, done, in_flight, 0.0, 0, 0.0, 0)
    return state


def test_the_warm_up_tells_how_far_it_is_and_what_is_left() -> None:
    state = warming(7, 35.0)
    assert "warm-up 7/20, about 65 s left" in plain_line(state)
    assert "warm-up 7/20, about 65 s left" in live_lines(state, 120)[0].plain
    assert (state.facts()["share"], state.facts()["left_s"], state.facts()["done"]) == (0.35, 65.0, 7)
    assert "warm-up 0/20 " in plain_line(warming(0, 3.0)), "nothing is known before the first request ended"


def test_a_warm_up_with_a_limit_ends_with_the_requests_in_flight() -> None:
    state = warming(4, 12.0, in_flight=2, limit_s=10.0)
    assert "time is up: awaiting 2 in flight, about 6 s left" in plain_line(state)


def test_the_warm_up_is_bounded_by_time_unless_its_length_is_given() -> None:
    inputs, default = load_of({**WORDS, "warmup": 50}), load_of({**WORDS, "warmup": None})
    assert (inputs.warm_up, inputs.warm_up_s) == (50, 0.0)
    assert (default.warm_up, default.warm_up_s) == (20, WARM_UP_S)


@pytest.mark.parametrize(
    "load",
    [
        Load(concurrency=2, requests=1, warm_up=20, warm_up_s=0.01),
        Load(rate=200.0, arrivals="constant", requests=1, warm_up=20, warm_up_s=0.000001),
    ],
    ids=str,
)
def test_a_warm_up_sends_nothing_after_its_limit(null_run: NullRun, load: Load) -> None:
    """Each client has sent one request, and the first of an open load leaves however slow the rate is."""
    facts, _ = null_run(NullBehaviour(delay_s=0.3), load)
    assert facts["statuses"] == {"ok": 1}
    assert facts["client"]["sent"] <= 1 + (load.concurrency or 1)


def test_a_window_shorter_than_a_request_is_told() -> None:
    facts: dict[str, Any] = {
        "window": {"start_s": 0.0, "end_s": 12.0},
        "load": {"span_s": 12.0},
        "metrics": {"latency": {"p50": 14_000.0}},
    }
    assert "the window of 12 s is shorter than a request (14 s)" in short_window(facts)[0]
    assert short_window({**facts, "metrics": {"latency": {"p50": 4_000.0}}}) == []
    assert short_window({**facts, "load": {"span_s": None}}) == [], "a run of a number of requests awaits them all"


def test_the_phases_have_their_own_errors() -> None:
    state = warming(3, 1.0)
    state.warm["refused"] = 2
    assert state.errors == 2
    state.begin()
    assert (state.errors, state.done) == (0, 0)
    state.add(ended(1.0, "refused"))
    assert (state.errors, state.done) == (1, 1)
