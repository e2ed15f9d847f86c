"""Deferred work of runners, such as CUDA graph capture, in the quiet times of the worker's loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.nodes import build_nodes
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.worker.loop import FIRST_REQUEST_S, QUIET_S, Worker
from mstar_orpheus.plugin import ORPHEUS
from mstar_orpheus.sources.tiny import write_tiny

NODE = "LLM"


@pytest.fixture
def runtime(tmp_path: Path) -> LocalRuntime:
    """A worker of two runners, without processes."""
    folder = write_tiny(tmp_path / "orpheus")
    spec = ORPHEUS.bound(folder, {})
    return LocalRuntime(spec, folder, built=build_nodes(spec, folder))


class Deferring:
    """Deferred work of a kind of runner: a piece is queued with the first job, as by a pass of a new kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> None:
        self.queued, self.done, self._is_new = 0, 0, True
        submit = kind.submit

        def submit_and_queue(runner: Any, job: Any) -> None:
            self.queued += self._is_new
            self._is_new = False
            submit(runner, job)

        def idle(_runner: Any) -> bool:
            self.done += self.queued
            self.queued = 0
            return False

        monkeypatch.setattr(kind, "submit", submit_and_queue)
        monkeypatch.setattr(kind, "idle", idle)


def quiet(worker: Worker) -> bool:
    """Give the worker a quiet time. Returns whether it asked its runners for deferred work."""
    turns = 0
    while worker.work_in_the_quiet(worker.quiet_since + 2 * QUIET_S):
        turns += 1
        assert turns < 100, "the work never ends"
    return turns > 0


def test_work_that_a_job_queues_after_the_start_is_done_in_the_next_quiet_time(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = runtime.workers
    runner = Deferring(monkeypatch, type(worker.runners[NODE]))

    assert quiet(worker) and not quiet(worker), "nothing is queued: the worker sleeps until a message comes"
    (outcome,) = runtime.ask(SampleRequest(text="hello", params={"max_output_tokens": 9, "temperature": 0.0}))
    assert outcome.status == "finished" and runner.queued == 1
    assert quiet(worker) and runner.done == 1
    assert not quiet(worker)


def test_each_turn_of_a_quiet_time_does_a_piece_of_one_runner(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes between two captures waits for one of them, not for one of each node."""
    (worker,) = runtime.workers
    assert len(worker.runners) > 1
    left, done = dict.fromkeys(worker.runners, 2), list[str]()

    def idle_of(name: str) -> Callable[[], bool]:
        def idle() -> bool:
            if left[name]:
                left[name] -= 1
                done.append(name)
            return left[name] > 0

        return idle

    for name, runner in worker.runners.items():
        monkeypatch.setattr(runner, "idle", idle_of(name))
    for expected in range(1, 2 * len(worker.runners) + 1):
        assert worker.work_in_the_quiet(worker.quiet_since + 2 * QUIET_S) and len(done) == expected
    assert sorted(done) == sorted([*worker.runners, *worker.runners])
    quiet(worker)
    assert not worker.has_idle_work and len(done) == 2 * len(worker.runners)


def test_a_worker_that_is_ready_leaves_time_for_a_first_request(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that waited for ready send requests now, which would wait for a capture."""
    (worker,) = runtime.workers
    monkeypatch.setattr("mstar_core.worker.loop.time.monotonic", lambda: 100.0)
    worker.life.stop_reason = "the test ends"
    worker.run()
    assert not worker.work_in_the_quiet(100.0 + FIRST_REQUEST_S + 0.9 * QUIET_S)
    assert worker.work_in_the_quiet(100.0 + FIRST_REQUEST_S + QUIET_S)
