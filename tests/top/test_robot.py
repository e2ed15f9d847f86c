"""`top` of a model that answers with whole values, such as the actions of a robot policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mstar_core.observe.frames import DeploymentStatus, EdgeView, GraphView, RequestStatus
from mstarctl.client.store import Store
from mstarctl.top import navigation
from mstarctl.top.data.pace import answers_at_once, pace
from mstarctl.top.data.view import View
from mstarctl.top.layout.pages import compose
from mstarctl.top.layout.requests import SORTS, choose, columns_of
from mstarctl.top.layout.state import State

PERIOD_S = 0.2


def requests(*latencies_s: float, starts: tuple[float, ...] = (), steps: int = 0) -> list[RequestStatus]:
    """Return ended requests of a robot: one per period, or at `starts`."""
    times = starts or tuple(100 + PERIOD_S * tick for tick in range(len(latencies_s)))
    return [
        RequestStatus(
            id=f"tick-{n}",
            handle=n + 1,
            inputs=["image", "text"],
            outputs=["action"],
            state="finished",
            started=start,
            ended=start + latency,
            ttft_ms=1000 * latency,
            step=steps,
            steps=steps,
            walks={"prefill": 1, "action_gen": 1},
        )
        for n, (start, latency) in enumerate(zip(times, latencies_s, strict=True))
    ]


def view(*latencies_s: float, starts: tuple[float, ...] = (), steps: int = 0) -> View:
    store = Store()
    store.deployment = DeploymentStatus(name="arm", state="ready", requests_s=5.0, ttft_p50_ms=38.0, ttft_p99_ms=93.0)
    store.graph = GraphView(edges=[EdgeView(name="actions", source="LLM", modality="action")])
    store.requests = {str(r.handle): r for r in requests(*latencies_s, starts=starts, steps=steps)}
    store.t = 110.0
    return View(store=store)


def text(shown: View, width: int = 140, height: int = 24) -> str:
    return "\n".join(row.plain for row in compose(shown, State(), width, height).lines)


@pytest.mark.parametrize("size", [(140, 40), (120, 34), (80, 24)])
def test_a_robot_policy_shows_latency_rate_and_ticks(size: tuple[int, int]) -> None:
    drawn = text(view(0.029, 0.036, 0.093, 0.04), *size)
    assert "LATENCY" in drawn and " HZ" in drawn and "TICK" in drawn
    assert "29 ms" in drawn and "latency" in drawn and "5.0 Hz" in drawn
    for absent in ("TOKENS", "TTFA", "AUDIO", " AGE", "TTFT"):
        assert absent not in drawn
    if size[0] >= 120:
        assert "image+text → action" in drawn


def test_a_tick_is_missed_by_an_answer_that_takes_longer_than_the_period() -> None:
    """The third answer takes 310 ms of 200, so that the robot skips a tick."""
    starts = (100.0, 100.2, 100.4, 100.8, 101.0)
    drawn = text(view(0.03, 0.03, 0.31, 0.03, 0.03, starts=starts))
    (row,) = (row for row in drawn.splitlines() if "missed" in row and row.startswith(" tick"))
    assert row.split()[0] == "tick-2" and "310 ms" in row
    assert "missed 1 of 5" in drawn


def test_overlapping_requests_have_no_period() -> None:
    """With several robots, the interval between two starts is not the period of either."""
    found = pace(requests(0.5, 0.5, 0.5, 0.5, 0.5))
    assert found.rate_hz is None and not found.late and found.hz[2] == pytest.approx(5.0)


def test_few_requests_have_no_period() -> None:
    assert pace(requests(0.03, 0.5)).rate_hz is None and pace([]).rate_hz is None


def test_counted_steps_have_a_column() -> None:
    assert "STEPS" not in text(view(0.03)) and "10/10" in text(view(0.03, steps=10))


def test_the_sort_key_takes_only_shown_columns() -> None:
    state, seen = State(), []
    shown = view(0.03)
    for _ in range(len(SORTS)):
        state = navigation.next_sort(shown, state)
        seen.append(state.sort.key)
    assert {"latency", "hz"} <= set(seen) and not {"tokens", "audio", "ttfa", "ttft"} & set(seen)


@pytest.mark.parametrize(
    ("kinds", "has", "lacks"),
    [
        ("action", "latency", "tokens"),
        ("tensor video", "latency", "ttft"),
        ("text", "tokens", "audio"),
        ("text image", "ttft", "latency"),
        ("audio", "audio", "latency"),
        ("", "tokens", "latency"),
    ],
)
def test_columns_follow_what_a_model_makes(kinds: str, has: str, lacks: str) -> None:
    keys = [column.key for column in columns_of(frozenset(kinds.split()))]
    assert has in keys and lacks not in keys
    assert answers_at_once(frozenset(kinds.split())) == ("latency" in keys)


def test_without_a_graph_the_requests_tell_what_is_made() -> None:
    shown = view(0.03, 0.03)
    store = shown.store
    store.graph = GraphView()
    assert replace(shown, store=store).kinds == {"action"}
    columns, rest = choose(120, shown.kinds, route=19)
    assert 1 + sum(column.width + 2 for column in columns) + rest == 120
