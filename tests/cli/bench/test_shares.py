"""Shares of request time: joins with the server's summaries."""

from __future__ import annotations

from typing import Any

import pytest

from mstar_core.observe.parts import BETWEEN, PARALLEL
from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.measure.shares import OUTSIDE, joined, shares, slow_and_usual, stages

near: Any = pytest.approx


def summary(name: str, *parts: tuple[str, str, float, float, float], total: float = 100.0) -> dict[str, Any]:
    return {
        "request": {"id": name, "started": 10.0, "ended": 10.0 + total / 1000},
        "sums": [
            {"process": "worker-0", "node": node, "kind": kind, "start_ms": start, "end_ms": end, "busy_ms": busy}
            for node, kind, start, end, busy in parts
        ],
    }


def ended(name: str, latency_s: float, at: float = 0.0) -> Outcome:
    return Outcome(
        index=0,
        phase=1,
        client=0,
        id=name,
        due_s=at,
        sent_s=at,
        headers_s=at,
        end_s=at + latency_s,
        status="ok",
        http_status=200,
    )


def test_stages_add_up_to_the_service_time() -> None:
    shares = stages(summary("a", ("llm", "compute", 10, 60, 50), ("llm", "queue", 0, 10, 10)), 120.0)
    assert shares == {
        OUTSIDE: pytest.approx(20),
        "llm": pytest.approx(50),
        "queue": pytest.approx(10),
        BETWEEN: pytest.approx(40),
    }


def test_compute_is_the_nodes_own_and_what_ran_in_parallel_is_subtracted() -> None:
    shares = stages(summary("a", ("talk", "compute", 0, 100, 100), ("wav", "compute", 50, 100, 50)), 100.0)
    assert shares == {"talk": near(100), "wav": near(50), PARALLEL: near(-50)}
    assert sum(shares.values()) == pytest.approx(100)


def test_a_node_without_input_waits_and_does_not_stall() -> None:
    shares = stages(summary("a", ("llm", "compute", 0, 40, 40), ("wav", "wait", 40, 90, 50)), 100.0)
    assert shares == {"llm": pytest.approx(40), "wav wait": pytest.approx(50), BETWEEN: pytest.approx(10)}


def test_recorded_parts_are_shown_as_they_are() -> None:
    recorded = {
        **summary("a", ("llm", "compute", 0, 40, 40)),
        "parts": [
            {"name": "llm", "kind": "compute", "node": "llm", "ms": 40.0},
            {"name": "queue", "kind": "queue", "ms": 60.0},
        ],
    }
    assert stages(recorded, 130.0) == {"llm": 40.0, "queue": 60.0, OUTSIDE: near(30.0)}


def test_missing_and_repeated_summaries() -> None:
    early, late = summary("a", ("x", "compute", 0, 50, 50)), summary("a", ("y", "compute", 0, 50, 50))
    spans = joined([ended("a", 0.1), ended("b", 0.1)], [early, late])
    assert spans.missing == 1
    assert "y" in spans.by_id["a"] and "x" not in spans.by_id["a"]


def test_the_slowest_are_told_from_those_around_the_median() -> None:
    outcomes = [ended(f"r{n}", 0.1 if n < 99 else 2.0, at=n) for n in range(100)]
    by_id = {outcome.id: {"queue" if outcome.end_s - outcome.due_s > 1 else "llm": 1.0} for outcome in outcomes}
    usual, slow = slow_and_usual(outcomes, by_id, is_late=True)
    assert (usual, slow) == ({"llm": 1.0}, {"queue": 1.0})
    assert shares([]) == {}
