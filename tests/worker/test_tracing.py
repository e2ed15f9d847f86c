"""Spans of a worker: compute is the time in steps, queue is time without any, loops are one span that goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mstar_core.conformance.clock import FakeClock
from mstar_core.engine.base import Done, Job, JobKey, StepResult
from mstar_core.messages.telemetry import Span
from mstar_core.worker.state.request import LoopJob, TaskJob, UnderWay
from mstar_core.worker.telemetry.tracing import PENDING, Tracer, node_at, parts_by_node

near: Any = pytest.approx


class Rank:
    """A tracer with a clock, and the jobs that its steps run."""

    def __init__(self) -> None:
        self.clock = FakeClock(10.0)
        self.tracer = Tracer(self.clock)
        self.jobs: dict[JobKey, UnderWay] = {}

    def add(self, entry: Any) -> Any:
        """Submit a job now."""
        entry.total.spent_before = entry.request.spent_s
        self.jobs[JobKey(len(self.jobs) + 1)] = entry
        return entry

    def step(self, duration_s: float, *entries: Any, rows: int = 1) -> None:
        """Run one step of these jobs."""
        self.clock.now += duration_s
        keys = [key for key, entry in self.jobs.items() if any(entry is each for each in entries)]
        self.tracer.step(StepResult(rows=rows, duration_s=duration_s, ran=keys), self.jobs)

    def spans(self) -> list[Span]:
        return self.tracer.take((), 0.0)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def request(handle: int = 7) -> Any:
    return SimpleNamespace(handle=handle, spent_s=0.0, jobs=set(), active={})


def run(node: str = "LLM", walk: str = "decode") -> Any:
    compiled = SimpleNamespace(tasks=(SimpleNamespace(name=node),), tasks_within=lambda loop: (0,))
    return SimpleNamespace(message=SimpleNamespace(walk=walk), totals={}, share=SimpleNamespace(walk=compiled))


def task(since: float = 0.0, of: Any = None, node: str = "LLM", within: Any = None) -> TaskJob:
    return TaskJob(request=of or request(), run=within or run(node), task=0, iteration=(0,), since=since)


def loop(since: float = 0.0, of: Any = None, feed: str | None = None) -> LoopJob:
    return LoopJob(
        request=of or request(),
        run=run(),
        loop=0,
        task=0,
        iteration=(),
        port="",
        streams=(),
        modality=None,
        outlets=(),
        feed=feed,
        since=since,
    )


def done(count: int) -> Done:
    return Done(job=Job(key=JobKey(1), handle=7), iterations=count)  # type: ignore[arg-type]


def test_a_task_that_waited_is_a_queue_span_and_a_compute_span(rank: Rank) -> None:
    job = rank.add(task(since=10.0))
    rank.clock.now = 10.3
    rank.step(0.2, job, rows=3)
    rank.tracer.task(job, "LLM", is_looped=False)
    compute, queue = rank.spans()
    assert (queue.kind, queue.start, queue.spent_s) == ("queue", 10.0, near(0.3))
    assert (compute.kind, compute.node, compute.walk, compute.batch) == ("compute", "LLM", "decode", 3)
    assert (compute.start, compute.end) == (near(10.3), near(10.5))


def test_compute_of_a_loop_is_the_time_in_its_steps_and_not_the_time_between_them(rank: Rank) -> None:
    mine, other = rank.add(loop(since=10.0)), rank.add(loop(of=request(8)))
    for _ in range(5):
        rank.step(0.5, mine)
        rank.step(1.5, other)
    rank.step(0.5, mine)
    rank.tracer.loop(mine, "LLM", done(6))
    compute, queue = rank.spans()
    assert (compute.kind, compute.count, compute.spent_s) == ("compute", 6, near(3.0))
    assert compute.end - compute.start == near(10.5)
    assert (queue.kind, queue.spent_s) == ("queue", near(7.5)), "other requests ran between its steps"


def test_a_loop_that_takes_a_stream_waits_between_its_steps(rank: Rank) -> None:
    job = rank.add(loop(since=10.0, feed="hidden"))
    rank.step(0.5, job)
    rank.clock.now += 1.0
    rank.step(0.5, job)
    rank.tracer.loop(job, "Talker", done(2))
    assert [(span.kind, round(span.spent_s, 3)) for span in rank.spans()] == [("compute", 1.0), ("wait", 1.0)]


def test_nodes_of_one_request_in_one_step_have_equal_parts(rank: Rank) -> None:
    one = request()
    main, branch = rank.add(task(of=one)), rank.add(task(of=one, node="LLM_cfg"))
    other = rank.add(task(of=request(8)))
    rank.step(0.6, main, branch, other)
    for job, node in ((main, "LLM"), (branch, "LLM_cfg"), (other, "LLM")):
        rank.tracer.task(job, node, is_looped=False)
    assert [round(span.spent_s, 3) for span in rank.spans()] == [0.3, 0.3, 0.6], "the step counts in full for a request"


def test_time_in_steps_of_the_same_request_is_no_queue(rank: Rank) -> None:
    one = request()
    chunk, decode = rank.add(task(since=10.0, of=one, node="codec")), rank.add(loop(of=one))
    rank.step(0.4, decode)
    rank.clock.now += 0.1
    rank.step(0.2, chunk)
    rank.tracer.task(chunk, "codec", is_looped=False)
    assert [(span.kind, round(span.spent_s, 3)) for span in rank.spans()] == [("compute", 0.2), ("queue", 0.1)]


def test_a_prompt_of_several_chunks_is_one_span_with_the_time_of_all(rank: Rank) -> None:
    job = rank.add(task(since=10.0))
    for _ in range(3):
        rank.step(0.2, job)
    rank.tracer.task(job, "LLM", is_looped=False)
    (span,) = rank.spans()
    assert (span.start, span.spent_s) == (10.0, near(0.6))


def test_tasks_inside_a_loop_are_one_span_when_the_walk_ends(rank: Rank) -> None:
    within, one = run("flow"), request()
    for _ in range(5):
        rank.clock.now += 0.5
        job = rank.add(task(since=rank.clock.now, of=one, within=within))
        rank.clock.now += 0.25
        rank.step(0.5, job)
        rank.tracer.task(job, "flow", is_looped=True)
    assert rank.spans() == []
    rank.tracer.walk_ended(one, within)
    compute, queue = rank.spans()
    assert (compute.node, compute.count, compute.start, compute.end) == ("flow", 5, 10.75, 16.25)
    assert (compute.spent_s, queue.spent_s) == (2.5, 1.25)


def test_steps_of_a_walk_in_progress_are_one_open_span_for_each_node(rank: Rank) -> None:
    within, one = run(), request()
    for _ in range(23):
        for node in ("LLM", "combine_cfg"):
            job = rank.add(task(of=one, within=within))
            rank.step(0.05, job)
            rank.tracer.task(job, node, is_looped=True)
    spans = rank.tracer.take((job, job), rank.clock.now)
    assert [(span.node, span.count, span.is_open) for span in spans] == [("LLM", 23, True), ("combine_cfg", 23, True)]
    assert [span.spent_s for span in spans] == [near(23 * 0.05)] * 2
    rank.tracer.walk_ended(one, within)
    assert [span.key for span in rank.spans()] == [span.key for span in spans], "they are replaced at the end"


def test_a_running_loop_is_reported_each_second_under_one_key(rank: Rank) -> None:
    job = rank.add(loop())
    rank.step(1.0, job)
    (first,) = rank.tracer.take([job], 11.0)
    assert rank.tracer.take([job], 11.5) == []
    (second,) = rank.tracer.take([job], 12.0)
    assert (first.key, first.is_open, second.end, second.spent_s) == (second.key, True, 12.0, 1.0)
    rank.step(0.5, job)
    rank.tracer.loop(job, "LLM", done(40))
    (last,) = rank.spans()
    assert (last.key, last.is_open, last.count, last.start, last.spent_s) == (first.key, False, 40, 10.0, 1.5)


def test_what_ran_for_a_request_that_fails_is_recorded(rank: Rank) -> None:
    one = request()
    job = rank.add(loop(of=one))
    one.jobs = set(rank.jobs)
    for _ in range(3):
        rank.step(0.5, job)
    rank.tracer.closed(one, rank.jobs)
    (span,) = rank.spans()
    assert (span.kind, span.count, span.spent_s, span.is_open) == ("compute", 3, 1.5, False)


def test_a_shared_step_is_divided_among_a_node_and_its_branches() -> None:
    found = parts_by_node(StepResult(rows=4, tokens=8, duration_s=0.8), ["LLM", "LLM", "LLM_cfg", "LLM"])
    assert {node: (part.rows, part.tokens, part.duration_s) for node, part in found.items()} == {
        "LLM": (3, 6, near(0.6)),
        "LLM_cfg": (1, 2, near(0.2)),
    }


def test_spans_beyond_the_limit_are_counted_and_dropped(rank: Rank) -> None:
    for _ in range(PENDING + 3):
        rank.tracer.task(task(), "LLM", is_looped=False)
    assert len(rank.spans()) == PENDING
    assert rank.tracer.dropped == 3


def test_a_loops_address_is_named_by_its_body() -> None:
    walk: Any = run().share.walk
    assert (node_at(walk, 0), node_at(walk, 1)) == ("LLM", "LLM")
