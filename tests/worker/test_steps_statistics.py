"""Times of a worker: sums by node, separate for launching, collecting, routing and waiting."""

from __future__ import annotations

import itertools

import pytest

from mstar_core.conformance.clock import FakeClock
from mstar_core.engine.base import StepResult
from mstar_core.worker.steps import FairShare, NodeStatistics, Steps
from tests.worker.test_steps import SlowRunner


def test_sums_only_grow_and_hold_the_last_step_beside_them() -> None:
    statistics = NodeStatistics()
    seen = []
    for rows, seconds in ((3, 0.5), (1, 0.25)):
        statistics.add(StepResult(rows=rows, tokens=2 * rows, duration_s=seconds))
        statistics.launch_s += 0.1
        seen.append(statistics.values())
    assert (seen[1]["steps"], seen[1]["rows"], seen[1]["tokens"], seen[1]["busy_s"]) == (2, 4, 8, 0.75)
    assert (seen[1]["batch"], seen[1]["step_s"]) == (1, 0.25)
    sums = ("steps", "rows", "tokens", "busy_s", "launch_s", "collect_s", "route_s")
    assert all(one[name] <= other[name] for one, other in itertools.pairwise(seen) for name in sums)


def test_launching_collecting_and_routing_are_counted_apart() -> None:
    runner, clock = SlowRunner("LLM", lookahead=0), FakeClock(0.0, tick=0.01)
    steps = Steps(runners={"LLM": runner}, scheduler=FairShare({"LLM": runner}), clock=clock)  # type: ignore[dict-item]
    runner.done.add(1)
    for _ in steps.collect(steps.launch()):
        clock.now += 3.0  # the caller routes
    values = steps.statistics["LLM"].values()
    assert values["route_s"] == pytest.approx(3.01)
    assert values["launch_s"] == pytest.approx(0.01)
    assert values["collect_s"] == pytest.approx(0.01)


def test_waiting_for_a_step_is_counted_for_the_worker() -> None:
    runner = SlowRunner("LLM")
    steps = Steps(runners={"LLM": runner}, scheduler=FairShare({"LLM": runner}), lookahead=1)  # type: ignore[dict-item]
    steps.launch()
    assert steps.waited_s == 0.0
    calls = iter([False, False, True])
    steps.wait(lambda: next(calls))
    assert steps.waited_s >= 1e-3, "it asks for the first time after a millisecond"
    assert steps.statistics["LLM"].collect_s == 0.0
