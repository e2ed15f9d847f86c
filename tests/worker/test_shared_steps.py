"""Loops that run together are counted once for all of them, with the same times as if each was counted alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.conformance.clock import FakeClock
from mstar_core.engine.base import Done, Job, JobKey, LoopStep, StepResult
from mstar_core.messages.telemetry import Span
from mstar_core.worker.state.request import LoopJob, TaskJob, UnderWay
from mstar_core.worker.telemetry.tracing import Tracer
from tests.worker.test_tracing import request, run

LOOPS = 4


class Looked(Mapping[JobKey, UnderWay]):
    """Jobs under way. looked: number of look-ups."""

    def __init__(self) -> None:
        self.jobs: dict[JobKey, UnderWay] = {}
        self.looked = 0

    def __getitem__(self, key: JobKey) -> UnderWay:
        self.looked += 1
        return self.jobs[key]

    def __iter__(self) -> Iterator[JobKey]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


class Rank:
    """A tracer, and loops of requests. Loops 1 and 2 belong to one request. is_alone: count each row of each step."""

    def __init__(self, *, is_alone: bool) -> None:
        self.clock = FakeClock(10.0)
        self.tracer = Tracer(self.clock)
        self.under_way = Looked()
        self.is_alone = is_alone
        self.requests = [request(handle) for handle in (1, 1, 3, 4)]
        self.requests[1] = self.requests[0]
        self.chunks = 0
        for number in range(LOOPS):
            self.start(number)

    def start(self, number: int) -> None:
        entry: Any = LoopJob(
            request=self.requests[number],
            run=run(f"node{number}"),
            loop=0,
            task=0,
            iteration=(),
            port="",
            streams=(),
            modality=None,
            outlets=(),
            since=self.clock.now,
        )
        self.tracer.submitted(entry)
        self.under_way.jobs[JobKey(number)] = entry

    def step(self, numbers: list[int]) -> None:
        """Run one iteration of these loops."""
        self.clock.now += 0.25
        keys = np.array(numbers)
        result = StepResult(duration_s=0.25, loop=LoopStep(keys=keys, ids=keys))
        result.ran = [JobKey(number) for number in numbers] if self.is_alone else []
        self.tracer.step(result, self.under_way)

    def end(self, number: int) -> None:
        """End a loop, and start the next one of its request."""
        entry = self.under_way.jobs.pop(JobKey(number))
        assert isinstance(entry, LoopJob)
        done = Done(job=Job(key=JobKey(number), handle=entry.request.handle), iterations=7)
        self.tracer.loop(entry, f"node{number}", done)
        self.start(number)

    def chunk(self, number: int) -> None:
        """Run a task of the request beside its loops."""
        self.chunks += 1
        key = JobKey(LOOPS + self.chunks)
        entry: Any = TaskJob(
            request=self.requests[number], run=run("codec"), task=0, iteration=(0,), since=self.clock.now
        )
        self.tracer.submitted(entry)
        self.clock.now += 0.5
        self.under_way.jobs[key] = entry
        self.tracer.step(StepResult(duration_s=0.125, ran=[key]), self.under_way)
        self.tracer.task(entry, "codec", is_looped=False)

    def spans(self) -> list[Span]:
        return self.tracer.take(self.under_way.jobs.values(), self.clock.now)

    def ended(self) -> list[Span]:
        """End every request as if it failed."""
        for number, each in enumerate(self.requests):
            each.jobs.add(JobKey(number))
        for each in (self.requests[0], *self.requests[2:]):
            self.tracer.closed(each, self.under_way)
        return self.tracer.take((), self.clock.now)


ACTS = st.one_of(
    st.tuples(st.just("steps"), st.sampled_from([[0], [1], [2], [0, 2], [0, 2, 3], [1, 2, 3], [0, 1], [2, 3]])),
    st.tuples(st.just("end"), st.integers(0, LOOPS - 1)),
    st.tuples(st.just("chunk"), st.integers(0, LOOPS - 1)),
    st.tuples(st.just("spans"), st.just(0)),
)


def figures(spans: list[Span]) -> list[tuple[Any, ...]]:
    return [
        (span.handle, span.kind, span.node, span.count, span.is_open, *(round(s, 6) for s in times(span)))
        for span in spans
    ]


def times(span: Span) -> tuple[float, float, float]:
    return span.start, span.end, span.spent_s


@given(st.lists(ACTS, max_size=40))
def test_times_are_those_of_steps_counted_for_each_loop_alone(acts: list[tuple[str, Any]]) -> None:
    alone, shared = Rank(is_alone=True), Rank(is_alone=False)
    for what, which in acts:
        for rank in (alone, shared):
            if what == "steps":
                for _ in range(3):
                    rank.step(which)
            elif what == "end":
                rank.end(which)
            elif what == "chunk":
                rank.chunk(which)
        if what == "spans":
            assert figures(shared.spans()) == figures(alone.spans())
    assert figures(shared.ended()) == figures(alone.ended())


def test_a_step_of_an_unchanged_batch_looks_at_no_job() -> None:
    rank = Rank(is_alone=False)
    for _ in range(2):
        rank.step([0, 2, 3])
    before = rank.under_way.looked
    for _ in range(100):
        rank.step([0, 2, 3])
    assert rank.under_way.looked == before
    rank.end(2)
    (span,) = [span for span in rank.spans() if not span.is_open]
    assert span.spent_s == 102 * 0.25


def test_batches_of_two_nodes_in_turn_are_both_shared() -> None:
    rank = Rank(is_alone=False)
    for _ in range(2):
        rank.step([0, 2])
        rank.step([1, 3])
    before = rank.under_way.looked
    rank.step([0, 2])
    rank.step([1, 3])
    assert rank.under_way.looked == before
