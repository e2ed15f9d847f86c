"""The load client against a null server: delays, stalls, limits, and every class of error."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mstarctl.bench.client.connection import Exchange
from mstarctl.bench.client.process import LoadClient
from mstarctl.bench.client.wire import ClientPlan, Job, Phase, ServerAddress
from mstarctl.bench.load.plan import Load
from mstarctl.bench.null_server import NullBehaviour
from mstarctl.bench.selftest import delayed, stalled
from tests.cli.bench.conftest import NullRun

DELAY_S, STALL_S = 0.05, 1.0


def test_a_known_delay_is_found() -> None:
    """Times of the client and the server are of one clock, so their order holds however busy the machine is."""
    outcomes = delayed(DELAY_S, span_s=2.0)
    waits = [outcome.chunks[0].at_s - outcome.sent_s for outcome in outcomes]
    held = [outcome.usage["total_ms"] / 1e3 for outcome in outcomes]
    beyond = [wait - delay for wait, delay in zip(waits, held, strict=True)]
    assert min(held) >= DELAY_S and min(beyond) > -1e-5, "no answer is seen before it was sent"
    assert all(outcome.due_s <= outcome.sent_s for outcome in outcomes), "no request leaves before its time"
    assert min(beyond) < DELAY_S / 2, "a delay that the client adds itself would be in all of them"


def test_an_open_load_shows_every_request_that_a_stall_delays() -> None:
    _, facts, waits = stalled(STALL_S, 0.5)
    assert sum(wait > STALL_S / 20 for wait in waits) >= 9, "ten requests were due in the stall"
    assert max(waits) > 0.8 * STALL_S
    assert facts["metrics"]["latency"]["p90"] > 500 * STALL_S


def test_a_closed_loop_sees_one_late_request() -> None:
    _, facts, waits = stalled(STALL_S, 0.5, clients=1)
    assert sum(wait > STALL_S / 2 for wait in waits) == 1
    assert facts["metrics"]["latency"]["p50"] < 500 * STALL_S
    assert facts["notes"]  # the report says that queueing is hidden


def test_hundreds_of_requests_are_in_flight_at_once(null_run: NullRun) -> None:
    """A client with a limit of connections would never send the last ones: the server waits for all of them."""
    load = Load(rate=500.0, arrivals="constant", requests=500, warm_up=0)
    facts, result = null_run(NullBehaviour(gathers=500), load, timeout_s=60.0, grace_s=60.0)
    assert facts["statuses"] == {"ok": 500}
    assert max(outcome.sent_s for outcome in result.outcomes()) < min(o.end_s for o in result.outcomes())


def test_lines_of_megabytes_are_received(null_run: NullRun) -> None:
    behaviour = NullBehaviour(lines=2, line_bytes=3 << 20)
    facts, result = null_run(behaviour, Load(concurrency=1, requests=2, warm_up=0))
    assert facts["statuses"] == {"ok": 2}
    assert [chunk.size_bytes for chunk in result.outcomes()[0].chunks] == [3 << 20] * 2


@pytest.mark.parametrize(
    ("behaviour", "status"),
    [
        (NullBehaviour(status=429), "refused"),
        (NullBehaviour(status=500), "http"),
        (NullBehaviour(lines=5, breaks_at=3, delay_s=0.01), "transport"),
        (NullBehaviour(lines=5, fails_at=3), "stream"),
        (NullBehaviour(hangs=True), "timeout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_failure_has_its_class(null_run: NullRun, behaviour: NullBehaviour, status: str) -> None:
    facts, result = null_run(behaviour, Load(concurrency=1, requests=2, warm_up=0), timeout_s=0.3)
    assert facts["statuses"] == {status: 2}
    assert facts["metrics"]["error_rate"]["value"] == 1.0
    assert facts["failures"][0]["status"] == status
    assert all(not outcome.is_ok for outcome in result.outcomes())


def test_what_is_still_running_after_the_grace_time_is_incomplete(null_run: NullRun) -> None:
    load = Load(rate=20.0, arrivals="constant", span_s=0.3, warm_up=0)
    facts, _ = null_run(NullBehaviour(hangs=True), load, grace_s=0.2)
    assert set(facts["statuses"]) == {"incomplete"}
    assert facts["metrics"]["error_rate"]["value"] == 0.0
    assert facts["metrics"]["latency"]["over"]


def test_cancelled_requests_leave_after_their_time(null_run: NullRun) -> None:
    load = Load(concurrency=2, requests=10, warm_up=0, cancel_share=1.0, cancel_after_s=0.05)
    facts, result = null_run(NullBehaviour(hangs=True), load)
    assert facts["statuses"] == {"cancelled": 10}, "the server answers none, and the time limit ends none"
    assert all(outcome.end_s - outcome.sent_s > 0.04 for outcome in result.outcomes())


def test_a_control_loop_counts_ticks_that_it_skips(null_run: NullRun) -> None:
    load = Load(concurrency=1, span_s=1.0, period_s=0.1, warm_up=0)
    facts, _ = null_run(NullBehaviour(delay_s=0.15), load)
    assert facts["statuses"]["skipped"] >= facts["statuses"]["ok"] - 1, "an answer takes longer than a period"
    assert facts["statuses"]["skipped"] + facts["statuses"]["ok"] == 10, "each tick is either sent or skipped"


def test_a_control_loop_sends_its_period_and_the_ticks_that_it_skipped() -> None:
    """As many ticks are reported by the requests as are recorded as skipped before the last request."""
    job = Job(0, -1.0, "/generate", "text/plain", "*/*", "r", 0, 0)
    server = ServerAddress(address="127.0.0.1", port=1, host="here")
    phase = Phase(jobs=[job], clients=1, period_s=0.02, span_s=0.2)
    plan = ClientPlan(number=0, server=server, bodies="", phases=[phase], timeout_s=9, grace_s=0, max_in_flight=9)
    sent: list[Any] = []

    async def run() -> None:
        client = LoadClient(plan, b"", SimpleNamespace(put=sent.append))  # type: ignore[arg-type]  # the used part

        async def send(exchange: Exchange, head: bytes, body: bytes) -> None:
            sent.append(head.decode())
            await asyncio.sleep(0.03)
            exchange.end("")

        client._send = send  # type: ignore[method-assign]
        await client.run(0, time.monotonic_ns())

    asyncio.run(run())
    heads = [item for item in sent if isinstance(item, str)]
    skipped = [getattr(item, "error", "") == "skipped" for item in sent[: len(sent) - sent[::-1].index(heads[-1])]]
    assert all("X-Period-Ms: 20\r\n" in head for head in heads)
    reported = sum(int(head.partition("X-Skipped-Ticks: ")[2].split("\r")[0]) for head in heads)
    assert reported == sum(skipped) > 0


def test_too_many_requests_in_flight_stop_the_run(null_run: NullRun) -> None:
    load = Load(rate=100.0, arrivals="constant", span_s=2.0, warm_up=0)
    facts, _ = null_run(NullBehaviour(hangs=True), load, max_in_flight=8, grace_s=0.1)
    assert facts["is_over_saturated"]
    assert "over-saturated" in facts["stopped"]
    assert sum(facts["statuses"].values()) == 8


def test_processes_share_the_load(null_run: NullRun) -> None:
    load = Load(rate=40.0, arrivals="constant", span_s=1.0, warm_up=4)
    facts, result = null_run(NullBehaviour(delay_s=0.01), load, processes=2)
    outcomes = result.outcomes()
    assert facts["client"]["processes"] == 2
    assert [outcome.index for outcome in outcomes] == list(range(len(outcomes)))
    assert facts["statuses"]["ok"] == len(outcomes) >= 39
