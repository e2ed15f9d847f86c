"""Timing of a worker's report: when due, and not between a new request and its first step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mstar_bagel.plugin import mstar_models
from mstar_core.config.deployment import RankPlan
from mstar_core.worker.main import shown_names
from mstar_core.worker.report import PATIENCE_S, PERIOD_S, QUIET_S, Report


@pytest.fixture
def report() -> tuple[Report, list[float]]:
    """A report whose parts are empty, and the times at which it went."""
    sent: list[float] = []

    class Tracer:
        dropped = 0

        def take(self, *_: Any) -> list[Any]:
            return []

    class Executor:
        tracer = Tracer()
        under_way: tuple[()] = ()

    class Life:
        name = "worker-0"

        def telemetry(self, values: dict[str, float], *_: Any, **__: Any) -> None:
            sent.append(values["now"])

    class Bare(Report):
        def values(self, now: float) -> dict[str, float]:
            return {"now": now}

        def _of_requests(self, now: float) -> tuple[list[Any], list[Any]]:
            return [], []

    made = Bare(life=Life(), executor=Executor(), transport=None, runners={}, steps=None)  # type: ignore[arg-type]
    return made, sent


def test_a_report_that_is_due_waits_for_a_turn_without_other_work(report: tuple[Report, list[float]]) -> None:
    made, sent = report
    made.send(10.0, is_busy=True)
    made.send(10.001, is_busy=True)
    assert sent == []
    made.send(10.002)
    assert sent == [10.002]


def test_a_worker_without_a_quiet_turn_reports_nevertheless(report: tuple[Report, list[float]]) -> None:
    made, sent = report
    times = [10.0 + number * 0.005 for number in range(200)]
    for now in times:
        made.has_news = True
        made.send(now, is_busy=True)
    gaps = [after - before for before, after in itertools.pairwise(sent)]
    assert len(sent) >= 7 and max(gaps) <= PERIOD_S + PATIENCE_S + 0.0101


def test_reports_keep_their_pace_in_quiet_turns(report: tuple[Report, list[float]]) -> None:
    made, sent = report
    for number in range(100):
        made.has_news = True
        made.send(10.0 + number * 0.005)
    assert len(sent) == 5


def test_without_news_the_next_report_is_two_seconds_later(report: tuple[Report, list[float]]) -> None:
    made, sent = report
    for number in range(500):
        made.send(10.0 + number * 0.01)
    assert sent == pytest.approx([10.0, 10.0 + PERIOD_S + QUIET_S, 10.0 + 2 * (PERIOD_S + QUIET_S)])


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        (("LLM", "combine_cfg"), {}),
        (("LLM", "LLM_cfg_text"), {}),
        (("LLM_cfg_text",), {"LLM": "LLM_cfg_text"}),
        (("LLM_cfg_text", "LLM_cfg_img"), {"LLM": "LLM_cfg_text"}),
    ],
)
def test_a_node_held_for_a_cache_branch_alone_reports_as_that_branch(
    nodes: tuple[str, ...], names: dict[str, str]
) -> None:
    model = next(model for model in mstar_models() if model.name == "bagel")
    assert shown_names(model, RankPlan(rank=1, device="cpu", nodes=nodes)) == names
