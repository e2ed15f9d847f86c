"""Spans of a worker: what time each thing took, bounded, with loops as one span that goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mstar_core.engine.base import StepResult
from mstar_core.worker.request import LoopJob, SpanTotal, TaskJob
from mstar_core.worker.tracing import PENDING, Tracer, node_at


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def entry(since: float = 0.0, **fields: Any) -> Any:
    task = SimpleNamespace(name="LLM")
    walk = SimpleNamespace(tasks=(task,), tasks_within=lambda loop: (0,))
    run = SimpleNamespace(message=SimpleNamespace(walk="decode"), totals={}, share=SimpleNamespace(walk=walk))
    request = SimpleNamespace(handle=7, waited_s=0.0)
    return SimpleNamespace(request=request, run=run, since=since, task=0, **fields)


def test_a_task_that_waited_is_a_queue_span_and_a_compute_span() -> None:
    clock = Clock()
    tracer = Tracer(clock)
    job = entry(since=9.5)
    tracer.step(StepResult(rows=3, duration_s=0.2))
    tracer.task(job, "LLM", is_looped=False)
    queue, compute = tracer.take((), 0.0)
    assert (queue.kind, queue.start) == ("queue", 9.5)
    assert queue.end == pytest.approx(9.8)
    assert (compute.kind, compute.node, compute.walk, compute.batch) == ("compute", "LLM", "decode", 3)
    assert compute.start == pytest.approx(9.8)
    assert compute.end == 10.0
    assert job.request.waited_s == pytest.approx(0.3)


def test_tasks_inside_a_loop_are_one_span_when_the_walk_ends() -> None:
    clock = Clock()
    tracer, job = Tracer(clock), entry()
    for _ in range(5):
        clock.now += 1
        tracer.step(StepResult(duration_s=0.5))
        tracer.task(job, "flow", is_looped=True)
    assert tracer.take((), 0.0) == []
    tracer.walk_ended(job.request, job.run)
    (span,) = tracer.take((), 0.0)
    assert (span.node, span.count, span.start, span.end) == ("flow", 5, 10.5, 15.0)


def test_steps_of_a_walk_in_progress_are_one_open_span_for_each_node() -> None:
    clock = Clock()
    tracer, job = Tracer(clock), TaskJob(**vars(entry()), iteration=(0,))
    for _ in range(23):
        clock.now += 0.1
        tracer.step(StepResult(duration_s=0.05))
        for node in ("LLM", "combine_cfg"):
            tracer.task(job, node, is_looped=True)
    spans = tracer.take((job, job), clock.now)
    assert [(span.node, span.count, span.is_open) for span in spans] == [("LLM", 23, True), ("combine_cfg", 23, True)]
    tracer.walk_ended(job.request, job.run)
    assert [span.key for span in tracer.take((), 0.0)] == [span.key for span in spans], "they are replaced at the end"


def test_a_running_loop_is_reported_each_second_under_one_key() -> None:
    tracer = Tracer(Clock())
    made = entry()
    job = LoopJob(
        request=made.request,
        run=made.run,
        loop=0,
        task=0,
        iteration=(),
        port="",
        streams=(),
        modality=None,
        outlets=(),
        total=SpanTotal(began=8.0),
    )
    (first,) = tracer.take([job], 10.0)
    assert tracer.take([job], 10.5) == []
    (second,) = tracer.take([job], 11.0)
    assert (first.key, first.is_open, second.end) == (second.key, True, 11.0)
    tracer.step(StepResult(duration_s=0.1))
    tracer.loop(job, "LLM", SimpleNamespace(iterations=40))  # type: ignore[arg-type]
    (last,) = tracer.take((), 11.5)
    assert (last.key, last.is_open, last.count, last.start) == (first.key, False, 40, 8.0)


def test_spans_beyond_the_limit_are_counted_and_dropped() -> None:
    tracer, job = Tracer(Clock()), entry()
    for _ in range(PENDING + 3):
        tracer.task(job, "LLM", is_looped=False)
    assert len(tracer.take((), 0.0)) == PENDING
    assert tracer.dropped == 3


def test_a_loops_address_is_named_by_its_body() -> None:
    walk: Any = entry().run.share.walk
    assert (node_at(walk, 0), node_at(walk, 1)) == ("LLM", "LLM")
