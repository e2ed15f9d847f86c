"""`top` of a model that answers with whole values, such as the actions of a robot policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from mstar_core.observe.frames import DeploymentStatus, EdgeView, GraphView, RequestStatus
from mstarctl.call.pace import keep_pace
from mstarctl.client.store import Store
from mstarctl.top import navigation
from mstarctl.top.data.pace import answers_at_once, pace
from mstarctl.top.data.view import View
from mstarctl.top.layout.pages import compose
from mstarctl.top.layout.request_list import SORTS, choose, columns_of
from mstarctl.top.layout.state import State

PERIOD_S = 0.2


def requests(
    *latencies_s: float,
    starts: tuple[float, ...] = (),
    steps: int = 0,
    is_named: bool = True,
    skipped: tuple[int | None, ...] = (),
) -> list[RequestStatus]:
    """Return ended requests of a robot: one per period, or at `starts`. is_named: the client names its period."""
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
            period_ms=1000 * PERIOD_S if is_named else None,
            skipped_ticks=skipped[n] if skipped else None,
        )
        for n, (start, latency) in enumerate(zip(times, latencies_s, strict=True))
    ]


def view(*latencies_s: float, **facts: Any) -> View:
    store = Store()
    store.deployment = DeploymentStatus(name="arm", state="ready", requests_s=5.0, ttft_p50_ms=38.0, ttft_p99_ms=93.0)
    store.graph = GraphView(edges=[EdgeView(name="actions", source="LLM", modality="action")])
    store.requests = {str(r.handle): r for r in requests(*latencies_s, **facts)}
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


def test_an_answer_later_than_the_clients_period_is_late_and_the_ticks_behind_it_are_missed() -> None:
    """The third answer takes 310 ms of 200: its own tick and the next one are missed."""
    starts = (100.0, 100.2, 100.4, 100.8, 101.0)
    drawn = text(view(0.03, 0.03, 0.31, 0.03, 0.03, starts=starts))
    (row,) = (row for row in drawn.splitlines() if "late " in row)
    assert row.split()[0] == "tick-2" and "310 ms" in row and "late +1" in row
    assert drawn.count("in time") == 4 and "missed 2 of 6" in drawn


def test_a_robot_that_cannot_keep_up_misses_every_tick_though_its_requests_follow_evenly() -> None:
    """Answers of 440 ms at 200 ms, sent at every third tick: as the client counts them, 60 of 60."""
    starts = tuple(100 + 3 * PERIOD_S * n for n in range(20))
    actual = pace(requests(*[0.44] * 20, starts=starts, skipped=(0, *[2] * 19)), 130.0)
    assert (actual.late, actual.skipped, actual.missed, actual.ticks) == (20, 40, 60, 60)


def test_call_the_header_and_the_rows_agree_except_for_ticks_behind_the_last_one_of_a_call() -> None:
    """Answers of 440 ms at 200 ms for 10 ticks: sent at ticks 0, 3, 6 and 9, and two ticks pass during the last one."""
    now, sent = 100.0, list[RequestStatus]()

    def send(skipped: int) -> None:
        nonlocal now
        (request,) = requests(0.44, starts=(now,), skipped=(skipped,))
        sent.append(msgspec.structs.replace(request, handle=len(sent) + 1))
        now += 0.44

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    called = keep_pace(1 / PERIOD_S, 10, send, clock=lambda: now, sleep=sleep)
    header, rows = pace(sent, 110.0), [request.missed_ticks(110.0) or 0 for request in sent]
    assert (called.missed, called.ticks) == (10, 10)
    assert rows == [3, 3, 3, 3] and header.missed == sum(rows) == called.missed + 2


def test_two_loops_one_after_the_other_are_counted_apart() -> None:
    """The last request of the first loop lasts three ticks, which no later request reports."""
    first, second = (0.44, 0.44), (0.44,)
    actual = pace(requests(*first, *second, starts=(100.0, 100.6, 103.0), skipped=(0, 2, 0)), 110.0)
    assert (actual.missed, actual.ticks) == (9, 9)


def test_the_client_is_believed_where_it_counts_its_skipped_ticks() -> None:
    """The network adds a little to 195 ms of the server, so that the client skipped a tick."""
    actual = pace(requests(0.195, 0.03, starts=(100.0, 100.4), skipped=(0, 1)), 110.0)
    assert (actual.missed, actual.ticks) == (1, 3)


def test_a_running_request_is_late_once_its_period_has_passed() -> None:
    """One tick is the request's own, which is late, and two have passed."""
    (sent,) = requests(0.0)
    running = msgspec.structs.replace(sent, ended=None, state="run")
    assert pace([running], 100.1).ticks == 0
    actual = pace([running], 100.5)
    assert (actual.late, actual.skipped, actual.ticks) == (1, 2, 3)


def test_a_failed_request_misses_its_tick() -> None:
    (sent,) = requests(0.01)
    assert pace([msgspec.structs.replace(sent, state="failed", error="engine_error")], 110.0).missed == 1


def test_without_a_period_no_tick_is_missed_and_the_header_says_why() -> None:
    """Requests that follow one another as fast as they can look like a loop, and are none."""
    drawn = text(view(*[0.2] * 8, is_named=False))
    assert "period unknown" in drawn and "missed" not in drawn and "in time" not in drawn


def test_counted_steps_have_a_column() -> None:
    assert "STEPS" not in text(view(0.03)) and "10/10" in text(view(0.03, steps=10))


def test_the_sort_key_takes_only_shown_columns() -> None:
    state, seen = State(), []
    shown = view(0.03)
    for _ in range(len(SORTS)):
        state = navigation.next_sort(shown, state)
        seen.append(state.sort.key)
    assert {"latency", "late"} <= set(seen) and not {"tokens", "audio", "ttfa", "ttft"} & set(seen)


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
