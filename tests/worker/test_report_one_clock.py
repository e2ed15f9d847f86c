"""Compute, metrics, traces and load tests agree, for random mixes of requests over nodes that share a rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_core.conformance.clock import FakeClock
from mstar_core.engine.base import Handle, StepResult
from mstar_core.messages.life import Telemetry
from mstar_core.messages.telemetry import RequestNews
from mstar_core.messages.work import EndStream, WalkDone
from mstar_core.observe.request_log import RequestLog
from mstar_core.transport.tensors import inline
from mstar_core.worker.executor import Executor
from mstar_core.worker.report import Report
from mstar_core.worker.steps import FairShare, Steps
from mstar_orpheus.plugin import ORPHEUS
from mstarctl.bench.measure.shares import stages
from mstarctl.output.waterfall import parts_lines
from tests.fakes.runner import FakeRunner
from tests.worker.test_executor import STOP, Bench, InlineTransport, ids

NODES = ("LLM", "snac_decoder")
MESSAGE_S = 0.0001
"""Time of the host between two turns."""


@dataclass
class TimedRunner(FakeRunner):
    """A runner whose steps take time of a simulated clock."""

    clock: FakeClock = field(default_factory=FakeClock)
    durations: Any = field(default_factory=lambda: cycle([0.001]))

    def launch(self) -> StepResult | None:
        result = super().launch()
        assert result is not None
        result.duration_s = next(self.durations)
        self.clock.now += result.duration_s
        return result


class Mix(Bench):
    """Requests on one rank with one thread. begins: handle -> turn of its arrival."""

    def __init__(self, tokens: dict[int, int], begins: dict[int, int], durations: dict[str, list[float]]) -> None:
        super().__init__({handle: [*ids(count), STOP] for handle, count in tokens.items()})
        self.clock = FakeClock()
        self.runners = {
            runner.name: TimedRunner(
                runner.name, runner.answer, runner.ids, clock=self.clock, durations=cycle(durations[runner.name])
            )
            for runner in (self.lm, self.snac)
        }
        transport: Any = InlineTransport()
        self.executor = Executor(ORPHEUS, 0, self.runners, self.outbox, transport, self.clock)
        self.steps = Steps(
            runners=self.runners,
            scheduler=FairShare(self.runners, self.clock),
            clock=self.clock,
            split=self.executor.split,
        )
        self.log = RequestLog("orpheus")
        self.began, self.ended = dict[int, float](), dict[int, float]()
        turn = 0
        while len(self.ended) < len(tokens):
            for handle in [handle for handle, at in begins.items() if at == turn]:
                self.arrives(handle)
            for result in self.steps.collect(self.steps.launch()):
                self.executor.take(result)
            self.outbox.flush()
            self.clock.now += MESSAGE_S
            self.goes_on()
            turn += 1
            assert turn < 5000, "the work does not end"
        self.report()

    def arrives(self, handle: int) -> None:
        self.began[handle] = self.clock.now
        self.open(handle)
        self.walk(handle, "SNAC", 1, "snac_chunk")
        self.walk(handle, "LLM", 2, "prefill", inputs={"tokens": inline(np.arange(5))})

    def goes_on(self) -> None:
        """Act as the conductor does at the end of each walk."""
        ended = self.post.of(WalkDone)
        self.post.sent.clear()
        for message in ended:
            if message.run == 2:
                self.walk(message.handle, "LLM", 3, "decode", max_iters=99)
            elif message.run == 3:
                total = message.streamed["audio_ids"]
                self.executor.end_stream(EndStream(handle=message.handle, stream="audio_ids", total=total))
            else:
                self.ended[message.handle] = self.clock.now
                self.executor.close(Handle(message.handle))

    def report(self) -> None:
        news = [
            RequestNews(handle=handle, id=f"r-{handle}", state="finished", started=began, ended=self.ended[handle])
            for handle, began in self.began.items()
        ]
        self.log.take("api", Telemetry(name="api", incarnation=1, requests=news), self.clock.now)
        spans = self.executor.tracer.take((), self.clock.now)
        self.log.take("worker-0", Telemetry(name="worker-0", incarnation=1, spans=spans), self.clock.now)

    def trace(self, handle: int) -> dict[str, Any]:
        record = self.log.find(f"r-{handle}")
        assert record is not None
        return self.log.trace(record, self.clock.now)


def compute(trace: dict[str, Any]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for total in trace["sums"]:
        if total["kind"] == "compute":
            found[total["node"]] += total["busy_ms"]
    return dict(found)


DURATIONS = st.lists(st.floats(0.0005, 0.05), min_size=1, max_size=7)
MIXES = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=5)
near: Any = pytest.approx


@settings(max_examples=25, deadline=None)
@given(MIXES, DURATIONS, DURATIONS)
def test_no_number_contradicts_another(requests: list[tuple[int, int]], lm: list[float], snac: list[float]) -> None:
    mix = Mix(
        {number: tokens for number, (tokens, _) in enumerate(requests, 1)},
        {number: at - min(at for _, at in requests) for number, (_, at) in enumerate(requests, 1)},
        {"LLM": lm, "snac_decoder": snac},
    )
    metrics = {node: 1000 * statistics.busy_s for node, statistics in mix.steps.statistics.items()}
    wall_ms = 1000 * (mix.clock.now - 100.0)
    assert sum(metrics.values()) <= wall_ms + 1e-6, (
        "a rank with one thread computes no longer than the time that passed"
    )
    all_requests: Counter[str] = Counter()
    for handle in mix.began:
        trace, total_ms = mix.trace(handle), 1000 * (mix.ended[handle] - mix.began[handle])
        own = compute(trace)
        all_requests.update(own)
        assert sum(own.values()) <= total_ms * 1.0001
        assert {part["node"]: part["ms"] for part in trace["parts"] if part["kind"] == "compute"} == near(own, abs=0.01)
        assert sum(part["ms"] for part in trace["parts"]) == near(total_ms, rel=0.02)
        shown = stages(trace, total_ms)
        assert {node: shown.get(node, 0.0) for node in own} == near(own, abs=0.01)
        assert sum(shown.values()) == near(total_ms, rel=0.02)
        queue = sum(part["ms"] for part in trace["parts"] if part["kind"] == "queue")
        assert trace["request"]["waited_ms"] == near(queue, abs=0.01)
        for node, spent in own.items():
            assert spent <= metrics[node] + 0.1
    shares_s = sum(mix.trace(handle)["request"]["device_s"] for handle in mix.began)
    assert 1000 * shares_s == near(sum(metrics.values()), rel=1e-6, abs=0.01), "shares add up to the time in steps"
    for node, spent_ms in metrics.items():
        assert spent_ms <= all_requests[node] + 0.1, "no step is left out"
        if len(requests) == 1:
            assert spent_ms == near(all_requests[node], abs=0.1)


def test_a_request_alone_has_the_same_compute_in_each_view() -> None:
    mix = Mix({1: 56}, {1: 0}, {"LLM": [0.004], "snac_decoder": [0.020]})
    trace = mix.trace(1)
    assert compute(trace) == near({"LLM": 57 * 4, "snac_decoder": 100}, abs=0.01)
    (line,) = parts_lines(trace, 120)
    assert "LLM 228 ms" in line and "snac_decoder 100 ms" in line
    assert {node: round(1000 * each.busy_s) for node, each in mix.steps.statistics.items()} == {
        "LLM": 228,
        "snac_decoder": 100,
    }


def test_a_request_reports_its_last_counts_when_it_ends() -> None:
    mix = Mix({1: 30}, {1: 0}, {"LLM": [0.004], "snac_decoder": [0.020]})
    report = Report(life=None, executor=mix.executor, transport=None, runners=mix.runners, steps=mix.steps)  # type: ignore[arg-type]
    (news,) = report.requests()
    assert (news.handle, news.tokens) == (1, 31)
    assert report.requests() == []
