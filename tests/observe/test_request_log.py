"""Request log: merged reports of several processes, in any order, with bounded memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from mstar_core.messages.life import Telemetry
from mstar_core.messages.telemetry import RequestNews, Span
from mstar_core.observe import request_log
from mstar_core.observe.frames import GraphView, NodeView, RequestStatus
from mstar_core.observe.parts import Part, parts
from mstar_core.observe.request_log import ENDED, LINGER_S, ORPHAN_S, SHOWN, SPANS, RequestLog, RequestRecord


def tell(log: RequestLog, child: str, now: float = 0.0, *spans: Span, **news: Any) -> None:
    told = [RequestNews(**news)] if news else []
    log.take(child, Telemetry(name=child, incarnation=1, requests=told, spans=list(spans)), now)


def shown(log: RequestLog, now: float = 10.0) -> dict[int, RequestStatus | None]:
    return dict(log.take_dirty(now))


def test_each_process_reports_its_part() -> None:
    log = RequestLog("m")
    tell(log, "worker-1", 0.0, Span(1, 7, "queue", "LLM", "decode", 1.75, 2.0), handle=7, tokens=5, pages=2)
    assert shown(log) == {}, "a request without a name is not shown"
    tell(log, "api", 0.0, Span(1, 7, "queue", "admission", "", 1.25, 1.75))
    tell(log, "api", 0.0, handle=7, id="r", state="run", started=1.0, outputs=["audio"])
    tell(log, "worker-0", 0.0, handle=7, tokens=7, pages=3, why="waits for pages")
    tell(log, "conductor", 0.0, handle=7, node="LLM", walk="decode", rank=1, active=["decode"], walks={"prefill": 1})
    request = shown(log)[7]
    assert request is not None
    assert (request.tokens, request.pages, request.waited_ms, request.why) == (12, 5, 750.0, "waits for pages")
    assert (request.node, request.rank, request.walk, request.walks) == ("LLM", 1, "decode", {"prefill": 1})
    assert shown(log) == {}


def test_a_request_is_on_the_host_of_its_rank_until_it_ends() -> None:
    log = RequestLog("m", lambda rank: "node-b" if rank == 1 else "")
    tell(log, "api", 0.0, handle=7, id="r", state="run", started=1.0)
    for rank, host in ((1, "node-b"), (0, "")):
        tell(log, "conductor", 0.0, handle=7, node="LLM", rank=rank)
        request = shown(log)[7]
        assert request is not None and request.host == host
    tell(log, "conductor", 0.0, handle=7, node="LLM", rank=1)
    record = log.find("r")
    assert record is not None and log.trace(record, 3.0)["request"]["host"] == "node-b"
    tell(log, "api", 0.0, handle=7, id="r", state="finished", started=1.0, ended=2.0)
    request = shown(log)[7]
    assert request is not None and request.host == ""


def test_the_steps_of_a_loop_are_those_of_the_rank_that_runs_it() -> None:
    log = RequestLog("m")
    tell(log, "api", 0.0, handle=7, id="r", state="run", started=1.0)
    tell(log, "worker-1", 0.0, handle=7, tokens=0)
    tell(log, "worker-0", 0.0, handle=7, step=23, steps=49, step_rate=5.2)
    request = shown(log)[7]
    assert request is not None and request.progress == "step 23 of 49, 5.2/s"
    tell(log, "api", 9.0, handle=7, id="r", state="cancelled", started=1.0, ended=9.0)
    request = shown(log)[7]
    assert request is not None and request.progress == "step 23 of 49"


def test_a_finished_request_shows_no_steps_until_their_last_count_has_come() -> None:
    """The api reports the end up to a second before the worker reports the last step."""
    log = RequestLog("m")
    tell(log, "worker-0", 0.0, handle=7, step=2, steps=3)
    tell(log, "api", 9.0, handle=7, id="r", state="finished", started=1.0, ended=9.0)
    early = shown(log)[7]
    assert early is not None and (early.progress, early.steps) == ("", 0)
    tell(log, "worker-0", 9.2, handle=7, step=3, steps=3)
    last = shown(log)[7]
    assert last is not None and last.progress == "step 3 of 3"


def test_reports_about_later_attempts_join_the_request_under_its_first_handle() -> None:
    log = RequestLog("m")
    tell(log, "api", 0.0, handle=7, id="r", state="run", started=1.0)
    tell(log, "worker-0", 0.0, Span(1, 7, "compute", "LLM", "decode", 2.0, 3.0), handle=7, tokens=5, pages=2)
    tell(log, "worker-1", 0.0, Span(1, 9, "compute", "LLM", "decode", 5.0, 6.0), handle=9, tokens=6, pages=4)
    tell(
        log, "api", 0.0, handle=7, id="r", state="resume", started=1.0, current=9, attempts=2, causes=["worker-0: died"]
    )
    tell(log, "worker-0", 0.0, handle=7, tokens=50)
    tell(log, "worker-1", 0.0, handle=9, tokens=8, pages=4)
    views = shown(log)
    assert set(views) == {7, 9} and views[9] is None
    request = views[7]
    assert request is not None and (request.attempts, request.causes) == (2, ["worker-0: died"])
    assert request.tokens == 5 + 8, "late reports about the first attempt are dropped"
    assert request.resumption == "attempt 2" and len(log.live[7].spans) == 2
    tell(log, "api", 9.0, handle=7, id="r", state="finished", started=1.0, ended=9.0, current=9, pauses_s=[1.9])
    log.settle(10.0 + LINGER_S)
    assert log.find("r") is not None and not log.live


def test_at_the_end_the_answers_usage_counts_and_no_pages_are_shown() -> None:
    log = RequestLog("m")
    tell(log, "worker-0", 0.0, handle=7, tokens=40, pages=3, why="waits")
    tell(log, "conductor", 0.0, handle=7, node="LLM", active=["decode"])
    tell(log, "api", 9.0, handle=7, id="r", state="failed", started=1.0, ended=9.0, tokens=38, error="worker_lost")
    request = shown(log)[7]
    assert request is not None
    assert (request.tokens, request.pages, request.why, request.node, request.active) == (38, 0, "", None, [])
    assert (request.state, request.error, request.ended) == ("failed", "worker_lost", 9.0)


def test_an_ended_request_stays_live_for_a_moment_then_in_view_and_in_the_log() -> None:
    log, ended = RequestLog("m"), []
    log.on_end.append(lambda known: ended.append(known.handle))
    tell(log, "api", 5.0, handle=7, id="r", state="finished", started=1.0, ended=5.0)
    log.settle(5.0 + LINGER_S / 2)
    assert 7 in log.live
    tell(log, "worker-0", 6.0, Span(1, 7, "transfer", "hidden", "", 1.0, 4.0))  # its last span arrives late
    shown(log)
    log.settle(5.1 + LINGER_S)
    assert 7 not in log.live and [r.state for r in shown(log).values() if r is not None] == ["finished"]
    assert ended == [7]
    record = log.find("r")
    assert record is not None and len(record.spans) == 1
    tell(log, "worker-0", 9.0, handle=7, tokens=99)
    assert shown(log) == {}
    tell(log, "conductor", 9.0, handle=7, walks={"prefill": 1})  # as a process without CPU time does
    assert record.request("m", 9.0).walks == {"prefill": 1} and shown(log) == {}


def test_watchers_see_the_last_ended_requests_and_failed_ones_longest() -> None:
    log = RequestLog("m")
    for handle in range(SHOWN + 20):
        state, error = ("failed", "worker_lost") if handle % 10 == 0 else ("finished", "")
        tell(log, "api", 0.0, handle=handle, id=f"r-{handle}", state=state, error=error, started=0.0, ended=0.0)
    log.settle(10.0)
    left = {handle for handle, request in shown(log).items() if request is None}
    assert len(log.shown) == SHOWN and left == {h for h in range(23) if h % 10}, "20 of those that did not fail"


def test_the_log_is_bounded() -> None:
    log = RequestLog("m")
    for handle in range(ENDED + 50):
        tell(log, "api", 0.0, handle=handle, id=f"r-{handle}", state="finished", started=0.0, ended=0.0)
    log.settle(10.0)
    assert len(log.ended) == ENDED
    assert log.find("r-0") is None
    known = RequestRecord(handle=1, seen=0.0)
    for key in range(SPANS + 20):
        known.add("worker-0", 1, Span(key, 1, "compute", "LLM", "decode", float(key), key + 0.5))
    assert (len(known.spans), known.spans_cut) == (SPANS, 20)
    assert known.sums["worker-0", "LLM", "decode", "compute"].spans == SPANS + 20, "sums are of all"


def test_the_oldest_ended_requests_lose_their_spans_and_keep_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "ENDED_SPANS", 25)
    log = RequestLog("m")
    for handle in range(5):
        spans = [Span(key, handle, "compute", "LLM", "decode", float(key), key + 0.5) for key in range(10)]
        tell(log, "worker-0", 0.0, *spans)
        tell(log, "api", 0.0, handle=handle, id=f"r-{handle}", state="finished", started=0.0, ended=0.0)
        log.settle(10.0)
    kept = {handle: (len(record.spans), record.spans_cut) for handle, record in log.ended.items()}
    assert kept == {0: (0, 10), 1: (0, 10), 2: (0, 10), 3: (10, 0), 4: (10, 0)}
    tell(log, "worker-0", 0.0, *(Span(key, 0, "compute", "LLM", "decode", 9.0, 9.5) for key in (10, 11)))
    tell(log, "worker-0", 0.0, *(Span(key, 4, "compute", "LLM", "decode", 9.0, 9.5) for key in range(10, 15)))
    kept = {handle: (len(record.spans), record.spans_cut) for handle, record in log.ended.items()}
    assert kept[0] == (2, 10) and kept[3] == (0, 10) and kept[4] == (15, 0), "spans that come late count"
    late = log.find("r-0")
    assert late is not None and log.trace(late)["sums"][0]["spans"] == 12


def test_an_open_span_is_replaced_and_summed_once() -> None:
    known = RequestRecord(handle=1, seen=0.0)
    for end in (1.0, 2.0):
        known.add("worker-0", 1, Span(5, 1, "compute", "LLM", "decode", 0.0, end, 0, is_open=True))
    known.add("worker-0", 1, Span(5, 1, "compute", "LLM", "decode", 0.0, 3.0, 30))
    assert [span.end for span in known.spans.values()] == [3.0]
    actual = known.sums["worker-0", "LLM", "decode", "compute"]
    assert (actual.spans, actual.count, actual.busy_s) == (1, 30, 3.0)


def test_the_time_on_devices_counts_each_rank_of_a_group_and_grows_after_the_end() -> None:
    log = RequestLog("m")
    log.graph = GraphView(
        nodes=[NodeView(name="LLM", replicas=[[0, 1], [2, 3]]), NodeView(name="codec", replicas=[[4]])]
    )
    tell(log, "api", 0.0, Span(1, 7, "compute", "decode image", "", 0.0, 3.0), handle=7, id="r", started=0.0, ended=5.0)
    tell(log, "worker-2", 0.0, Span(1, 7, "compute", "LLM", "decode", 0.0, 4.0, busy_s=4.0, device_s=1.5))
    first = shown(log)[7]
    assert first is not None and first.device_s == 3.0, "two ranks computed; the api has no device"
    tell(log, "worker-4", 0.0, Span(1, 7, "compute", "codec", "chunk", 4.0, 5.0, busy_s=1.0, device_s=0.25))
    later = shown(log)[7]
    assert later is not None and later.device_s == 3.25


def test_reports_of_unnamed_requests_are_dropped() -> None:
    log = RequestLog("m")
    tell(log, "worker-0", 0.0, handle=7, tokens=1)
    log.settle(ORPHAN_S + 1)
    assert not log.live and not log.ended


def test_the_reports_of_a_dead_process_are_dropped() -> None:
    log = RequestLog("m")
    tell(log, "api", 0.0, handle=7, id="r", state="run", started=0.0)
    tell(log, "worker-0", 0.0, handle=7, tokens=5, pages=9)
    log.part("worker-0")
    request = shown(log)[7]
    assert request is not None and request.pages == 0
    log.part("api")
    assert shown(log) == {7: None}


def test_a_request_that_failed_with_its_worker_keeps_its_counts() -> None:
    log = RequestLog("m")
    tell(log, "api", 0.0, handle=7, id="r", state="run", started=1.0, audio_s=5.7)
    tell(log, "worker-0", 0.0, handle=7, tokens=1)
    tell(log, "worker-1", 0.0, Span(1, 7, "queue", "LLM", "decode", 1.5, 2.0), handle=7, tokens=489, pages=9, why="x")
    log.part("worker-1")
    tell(log, "api", 9.0, handle=7, id="r", state="failed", started=1.0, ended=9.0, audio_s=5.7, error="worker_lost")
    request = shown(log)[7]
    assert request is not None
    assert (request.tokens, request.waited_ms, request.audio_s, request.pages) == (490, 500.0, 5.7, 0)


def test_the_queue_of_a_request_is_never_longer_than_the_request() -> None:
    log = RequestLog("m")
    tell(log, "api", 0.0, handle=7, id="r", state="finished", started=1.0, ended=3.0)
    for key, node in enumerate(("LLM", "codec", "flow")):
        tell(log, "worker-0", 0.0, Span(key, 7, "queue", node, "", 1.0, 3.0))
    request = shown(log)[7]
    assert request is not None and request.waited_ms == 2000.0


def test_the_queue_of_a_running_request_is_computed_once_a_second_and_exact_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[float] = []

    def counted(records: Iterable[dict[str, Any]], total_ms: float) -> list[Part]:
        computed.append(total_ms)
        return parts(records, total_ms)

    monkeypatch.setattr(request_log, "parts", counted)
    log, waited = RequestLog("m"), []
    tell(log, "api", 0.0, handle=7, id="r", state="run", started=0.0)
    for tenth in range(25):
        now = tenth / 10
        tell(log, "worker-0", now, Span(tenth, 7, "queue", "LLM", "decode", now, now + 0.1), handle=7, tokens=tenth)
        request = shown(log, now + 0.1)[7]
        assert request is not None
        waited.append(request.waited_ms)
    assert len(computed) == 3 and sorted(set(waited)) == [100.0, 1100.0, 2100.0]
    tell(log, "api", 2.5, handle=7, id="r", state="finished", started=0.0, ended=2.5)
    (record,) = log.all()
    for _ in range(2):
        assert record.request("m", 9.0).waited_ms == 2500.0
    assert len(computed) == 4


def test_totals_only_grow_and_first_outputs_count_once() -> None:
    log = RequestLog("m")
    for tokens in (5, 9):
        tell(log, "worker-0", 1.0, handle=7, tokens=tokens)
    for _ in range(2):
        tell(log, "api", 1.0, handle=7, id="r", state="run", started=0.0, ttft_s=0.2, ttfa_s=0.4, audio_s=1.5)
    tell(log, "api", 1.0, handle=7, id="r", state="finished", started=0.0, ended=2.0, ttft_s=0.2, tokens=8, audio_s=1.5)
    assert (log.tokens, log.audio_s) == (9, 1.5)
    assert log.ttft.quantiles(2.0, 0.5) == (0.2,)
    assert log.latency.quantiles(2.0, 0.5) == (2.0,), "of the whole request"
    assert log.ttfa.quantiles(100.0, 0.5, 0.99) == (None, None)
