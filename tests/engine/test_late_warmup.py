"""Warm-up of a restarted worker: pieces between steps and in quiet times, beside requests that go on."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mstar_core.conformance.clock import FakeClock
from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.nodes import RuntimeSettings, build_nodes
from mstar_core.conformance.runtime import LocalRuntime, ended
from mstar_core.engine.cuda_graphs.cache import CaptureSizes, GraphCache, GraphCounts
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.late_warmup import MISSES_ALONE, REST, LateWarmup, serves_first
from mstar_core.engine.runner import NodeRunner
from mstar_core.engine.slack import MARGIN_S, Slack
from mstar_core.worker.loop import QUIET_S
from mstar_core.worker.start.build import plan_late
from mstar_core.worker.start.compile_pass import TracedNode
from mstar_orpheus.plugin import ORPHEUS
from mstar_orpheus.sources.tiny import write_tiny
from tests.engine.tiny_engine import Driver, make_engine, prompt


class Capturing:
    """A runner whose `idle` takes a second and captures one of so many graphs."""

    def __init__(self, clock: FakeClock, graphs: int) -> None:
        self.graph_counts = GraphCounts(planned=lambda: graphs - self.captured)
        self.captured = 0
        self._clock, self._graphs = clock, graphs

    def idle(self) -> bool:
        self._clock.sleep(1.0)
        self.captured += 1
        self.graph_counts.captured += 1
        self.graph_counts.capture_s += 1.0
        return self.captured < self._graphs


def late_of(clock: FakeClock, **runners: Capturing) -> LateWarmup:
    return LateWarmup(runners=cast("dict[str, NodeRunner]", runners), clock=clock)


def test_every_life_but_the_first_serves_before_its_warm_up() -> None:
    assert [serves_first(incarnation) for incarnation in (1, 2, 3)] == [False, True, True]


def test_a_piece_between_steps_is_followed_by_steps() -> None:
    clock = FakeClock(10.0)
    late = late_of(clock)
    done: list[str] = []
    late.pieces += [lambda: (done.append("first"), clock.sleep(0.5)), lambda: done.append("second")]
    assert late.is_due()
    late.work()
    assert done == ["first"] and not late.is_due() and late.wait_s() == pytest.approx(0.5 * REST)
    clock.sleep(0.5 * REST)
    assert late.is_due()
    late.work()
    assert done == ["first", "second"] and not late.is_due() and late.wait_s() == float("inf")


def test_only_a_node_whose_steps_run_uncaptured_captures_between_steps() -> None:
    clock = FakeClock(10.0)
    speech, codec = Capturing(clock, graphs=2), Capturing(clock, graphs=2)
    late = late_of(clock, speech=speech, codec=codec)
    assert not late.is_due()
    for expected in (1, 2, 2):
        speech.graph_counts.misses += 1
        if late.is_due():
            late.work()
        clock.sleep(REST + 0.1)
        assert (speech.captured, codec.captured) == (expected, 0)
        assert not late.is_due(), "no step has run since"


def test_a_capture_waits_for_a_gap_that_no_listener_hears() -> None:
    clock, left = FakeClock(10.0), [math.inf]
    speech = Capturing(clock, graphs=3)
    late = late_of(clock, speech=speech)
    late.slack = Slack(lambda: left[0])
    assert not late.is_due()
    speech.graph_counts.misses += 1
    late.work()
    clock.sleep(REST + 0.1)
    speech.graph_counts.misses += 1
    left[0] = 1.0 + MARGIN_S / 2
    assert not late.is_due(), "the one before took a second"
    left[0] = 1.1 + MARGIN_S
    assert late.is_due()


def test_captures_for_the_prompt_of_a_single_client_wait_for_a_quiet_time() -> None:
    clock, requests = FakeClock(10.0), [1]
    speech = Capturing(clock, graphs=9)
    late = late_of(clock, speech=speech)
    late.open_requests = lambda: requests[0]
    assert not late.is_due()
    speech.graph_counts.prefill_misses += 3
    assert not late.is_due(), "the request would wait for captures that it does not use"
    requests[0] = 0
    assert not late.is_due(), "and so would the next one"
    requests[0] = 2
    assert late.is_due(), "the prompt of the other may use it"
    requests[0] = 1
    speech.graph_counts.misses += MISSES_ALONE
    assert late.is_due(), "a loop whose every step misses is faster with it"


def test_a_missed_bucket_is_captured_next_while_requests_run() -> None:
    """Three sequences decode without a bucket for them. Theirs is captured before the others, within a few steps."""
    sizes = CaptureSizes(decode=(1,), decode_later=(2, 4, 8, 16), prefill=(16,), prefill_later=(32, 64))
    captures = GraphCache(torch.device("cpu"))
    engine = make_engine(graphs=sizes, captures=captures, lookahead=1)
    late = LateWarmup(runners={"LM": engine}, clock=FakeClock(10.0, tick=0.1))
    driver = Driver(engine, lookahead=1)
    assert not late.is_due()
    waiting = int(engine.counters()["graphs_planned"])
    assert waiting == 6
    for handle in range(3):
        driver.open(handle)
        driver.prefill(handle, prompt(handle, 3))
        driver.decode(handle, 40)
    captured: list[int] = []
    for turn in range(12):
        if late.is_due():
            while driver.running:
                driver.collect()
            late.work()
            captured.append(turn)
        driver.turn()
    assert captured and captured[0] <= 4
    before = engine.counters()
    assert before["graphs_planned"] < waiting
    assert (4,) in decode_sizes(engine) and (2,) not in decode_sizes(engine)
    for _ in range(4):
        driver.turn()
    assert engine.counters()["graph_misses"] == before["graph_misses"], "steps of three sequences are replayed"
    driver.run()
    assert not driver.failed


def decode_sizes(engine: KVCacheEngine) -> list[tuple[int, ...]]:
    graphs = engine._runner.graphs
    assert graphs is not None and graphs.decode is not None
    return graphs.decode.buckets.sizes


def test_a_piece_that_fails_is_logged_and_the_others_follow(caplog: pytest.LogCaptureFixture) -> None:
    late = late_of(FakeClock(10.0))
    done: list[int] = []
    late.pieces += [lambda: 1 // 0, lambda: done.append(1)]
    late.work()
    late.work()
    assert done == [1] and "a piece of the warm-up failed" in caplog.text


def test_synthetic_requests_wait_until_no_request_is_open() -> None:
    late = late_of(FakeClock(10.0))
    done: list[str] = []
    late.requests.append(lambda: done.append("samples"))
    assert not late.is_due(), "never between steps"
    assert not late.work_in_the_quiet(has_requests=True) and not done
    assert late.work_in_the_quiet(has_requests=False) and done == ["samples"]
    assert not late.work_in_the_quiet(has_requests=False)


def test_a_node_captures_its_largest_decode_step_first_and_prompts_last() -> None:
    sizes = CaptureSizes(decode=(1, 4), decode_later=(2,), prefill=(16,), prefill_later=(32,))
    captures = GraphCache(torch.device("cpu"))
    engine = make_engine(graphs=sizes, captures=captures, is_captured=False)
    engine.queue_captures()
    titles: list[str] = []
    while captures.queue:
        titles.append(captures.queue[0].title)
        engine.idle()
    assert titles[:2] == ["decode graph of 4 sequences", "decode graph of 1 sequences"]
    assert sorted(titles[2:]) == sorted(
        ["decode graph of 2 sequences", "prefill graph of 16 tokens", "prefill graph of 32 tokens"]
    )


def test_requests_are_served_while_a_worker_warms_up(tmp_path: Path) -> None:
    """The pieces run while no step is in flight, between the steps of a request, and change no sound."""
    folder = write_tiny(tmp_path / "orpheus")
    spec = ORPHEUS.bound(folder, {})
    request = SampleRequest(text="hello", params={"max_output_tokens": 60, "temperature": 0.0})
    expected = LocalRuntime(spec, folder, built=build_nodes(spec, folder)).ask(request)[0]
    settings = RuntimeSettings(lookahead=1)
    runtime = LocalRuntime(spec, folder, settings, built=build_nodes(spec, folder))
    (worker,) = runtime.workers
    in_flight: list[int] = []
    late = LateWarmup(clock=FakeClock(tick=1.0))
    late.pieces += [lambda: in_flight.append(worker.steps.count)] * 5
    late.requests.append(lambda: in_flight.append(-1))
    worker.late = late
    call = runtime.send(request)
    while runtime.api.calls:
        runtime.step()
    assert in_flight == [0] * 5, "all pieces ran, without a step in flight; no synthetic request ran beside the request"
    assert ended(call).outputs == expected.outputs
    assert worker.work_in_the_quiet(worker.quiet_since + 2 * QUIET_S) and in_flight[-1] == -1


def test_the_warm_up_of_a_start_is_left_whole(tmp_path: Path) -> None:
    """Every node queues its captures; modules of a tensor-parallel group do not run alone."""
    late, queued = LateWarmup(), []

    def node(name: str) -> TracedNode:
        runner = SimpleNamespace(queue_captures=lambda: queued.append(name), idle=lambda: False)
        of_graph: Any = next(each for each in ORPHEUS.nodes if each.name == name)
        return TracedNode(spec=of_graph, runner=cast("NodeRunner", runner), module=torch.nn.Module())

    nodes = [node("LLM"), node("snac_decoder")]
    plan_late(late, nodes, frozenset({"LLM"}), lambda: None)
    assert queued == ["LLM", "snac_decoder"] and set(late.runners) == {"LLM", "snac_decoder"}
    assert len(late.pieces) == 3, "two captures and the module that is not shared"
    assert len(late.requests) == 2, "a prompt of ids, and the samples"
