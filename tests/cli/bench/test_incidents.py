"""Incidents of a run: the server's sentences, outages, deaths, and waits after refusals."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from mstar_core.errors import ExitCode
from mstarctl.bench.client.connection import Exchange, retry_after_s
from mstarctl.bench.client.process import LONGEST_RETRY_S, REFUSED_S, wait_after
from mstarctl.bench.load.plan import Load
from mstarctl.bench.measure.incidents import failures, incident_lines, incidents, outages
from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.measure.window import MeasuredWindow
from mstarctl.bench.null_server import NullBehaviour
from mstarctl.bench.run import exit_code
from mstarctl.bench.show.table import is_loud, result_lines
from tests.cli.bench.conftest import NullRun

WINDOW = MeasuredWindow(start_s=0.0, end_s=30.0)


def ended(end_s: float, status: str = "ok", detail: str = "", http: int = 200) -> Outcome:
    return Outcome(
        index=round(end_s * 1000),
        phase=1,
        client=0,
        id=f"b-{end_s}",
        due_s=end_s - 0.1,
        sent_s=end_s - 0.1,
        headers_s=end_s,
        end_s=end_s,
        status=status,
        http_status=http,
        detail=detail,
    )


def test_reasons_are_counted_without_the_ids_of_their_requests() -> None:
    actual = failures([ended(n, "stream", f"engine_error: request b-0123abcd-{n} failed") for n in range(1, 5)])
    assert actual == [{"status": "stream", "reason": "engine_error: request ID failed", "n": 4}]


def test_an_outage_lasts_from_the_first_failure_to_the_next_success() -> None:
    refused = [ended(5 + n / 10, "refused", "503 worker_lost: a worker died", 503) for n in range(40)]
    (actual,) = outages([ended(1.0), ended(4.0), *refused, ended(10.0)])
    assert (actual["from_s"], actual["to_s"], actual["requests"]) == (5.0, 10.0, 40)
    assert actual["reason"] == "503 worker_lost: a worker died"


def test_refusals_between_successes_are_no_outage() -> None:
    """An overloaded server refuses some requests and answers others."""
    mixed = [ended(n / 10, "refused" if n % 2 else "ok", "429 queue_full", 429 if n % 2 else 200) for n in range(40)]
    assert outages(mixed) == []


def event(at_s: float, kind: str, **facts: Any) -> dict[str, Any]:
    return {"at_s": at_s, "type": kind, **facts}


CRASH = [
    event(-60.0, "deployment.ready"),
    event(3.0, "child.died", child="worker-1", cause="killed by SIGKILL"),
    event(3.1, "deployment.degraded", reason="worker-1 was killed"),
    event(13.5, "deployment.ready"),
]


def test_deaths_and_states_of_the_window_are_told() -> None:
    lines = incident_lines({"incidents": incidents(CRASH, WINDOW)})
    assert lines == [
        "SERVER worker-1 died at 3.0 s: killed by SIGKILL",
        "SERVER degraded from 3.1 s to 13.5 s: worker-1 was killed",
    ]
    assert all(map(is_loud, lines))


def test_what_happened_before_or_after_the_window_is_no_incident_of_it() -> None:
    early = [{**item, "at_s": item["at_s"] - 100.0} for item in CRASH]
    assert incidents(early, WINDOW) == []
    assert incidents([CRASH[0], *({**item, "at_s": item["at_s"] + 100.0} for item in CRASH[1:])], WINDOW) == []


def test_a_server_that_was_degraded_all_the_time_is_told() -> None:
    (actual,) = incidents([event(-5.0, "deployment.degraded", reason="restarting")], WINDOW)
    assert (actual["state"], actual["to_s"]) == ("degraded", None)


def test_a_death_in_the_window_is_exit_8_unless_it_is_expected() -> None:
    facts: dict[str, Any] = {
        "is_interrupted": False,
        "statuses": {"ok": 9},
        "asserts": [],
        "client": {"is_bound": False},
        "incidents": incidents(CRASH, WINDOW),
        "expects_restarts": False,
    }
    assert exit_code(facts, is_strict=False) == ExitCode.ASSERTION
    assert exit_code({**facts, "expects_restarts": True}, is_strict=False) == ExitCode.DONE
    assert exit_code({**facts, "incidents": []}, is_strict=False) == ExitCode.DONE


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 2.0),
        ("0", 0.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
        ("soon", -1.0),
        ("inf", -1.0),
    ],
)
def test_retry_after_is_a_number_or_a_date(text: str, seconds: float) -> None:
    assert retry_after_s(text, 60.0) == seconds


@pytest.mark.parametrize(
    ("status", "retry_s", "error", "waits_s"),
    [
        (503, 2.0, "", 2.0),
        (429, 0.0, "", 0.0),
        (429, 7200.0, "", LONGEST_RETRY_S),
        (503, -1.0, "", REFUSED_S),
        (0, -1.0, "transport", REFUSED_S),
        (200, -1.0, "transport", 0.0),
        (400, -1.0, "", 0.0),
        (200, -1.0, "", 0.0),
    ],
)
def test_a_client_waits_as_a_refusal_says(status: int, retry_s: float, error: str, waits_s: float) -> None:
    told = Exchange(over=cast("asyncio.Future[None]", None), status=status, retry_after_s=retry_s, error=error)
    assert wait_after(told) == waits_s


def test_a_refused_closed_loop_waits_as_told(null_run: NullRun) -> None:
    """Without the wait it would send thousands of requests in this second."""
    load = Load(concurrency=2, span_s=1.0, warm_up=0)
    facts, result = null_run(NullBehaviour(status=503, retry_after_s=30), load)
    assert facts["statuses"] == {"refused": 2}
    assert facts["outages"] == [] and len(result.outcomes()) == 2


def test_the_servers_sentence_is_kept_and_printed(null_run: NullRun) -> None:
    facts, result = null_run(
        NullBehaviour(status=400, sentence="robot_state has 8 values, allowed are 1 to 2 values"),
        Load(concurrency=1, requests=3, warm_up=0),
    )
    sentence = "400 invalid_value: robot_state has 8 values, allowed are 1 to 2 values"
    assert [outcome.detail for outcome in result.outcomes()] == [sentence] * 3
    assert f"3x http: {sentence}" in result_lines(facts)
