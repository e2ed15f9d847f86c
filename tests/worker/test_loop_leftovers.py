"""A worker whose conductor no longer knows a request: it is closed, and what waits for it is given back."""

from __future__ import annotations

from pathlib import Path

from mstar_core.engine.base import Handle
from mstar_core.messages.requests import Reconcile
from mstar_core.messages.work import CloseRequest
from tests.worker.test_executor import Bench
from tests.worker.test_loop_dead_peers import Box, stream_item, walks, worker


def test_a_request_whose_end_was_lost_is_closed(tmp_path: Path) -> None:
    bench = Bench({})
    box = Box(*(("conductor", 1, walks(handle)) for handle in (1, 2, 3)))
    made = worker(bench, box, tmp_path)
    made.drain()
    for _ in range(2):
        assert len(bench.executor.requests) == 3 and made.leftovers.closed == 0
        made.dispatch(Reconcile(live=[2], newest=2))
    assert list(bench.executor.requests) == [2, 3], "the third is newer than the message"
    assert all(Handle(1) not in runner.open_handles for runner in (bench.lm, bench.snac))
    assert made.leftovers.closed == 1 and made.report.leftovers is made.leftovers


def test_tensors_for_a_request_that_never_came_are_returned(tmp_path: Path) -> None:
    bench = Bench({})
    made = worker(bench, Box(("worker-1", 1, stream_item(1, 10)), ("worker-1", 1, stream_item(9, 90))), tmp_path)
    made.drain()
    for _ in range(2):
        assert not made.early.abandoned
        made.dispatch(Reconcile(live=[], newest=5))
    assert [ref.slot for ref in made.early.abandoned] == [10]  # type: ignore[union-attr]
    made.handle("worker-1", stream_item(1, 11))
    assert [ref.slot for ref in made.early.abandoned] == [10, 11]  # type: ignore[union-attr]


def test_requests_that_end_as_they_should_are_no_leftovers(tmp_path: Path) -> None:
    bench = Bench({})
    made = worker(bench, Box(("conductor", 1, walks(1))), tmp_path)
    made.drain()
    made.dispatch(Reconcile(live=[1], newest=1))
    made.dispatch(CloseRequest(handle=1))
    for _ in range(2):
        made.dispatch(Reconcile(live=[], newest=1))
    assert made.leftovers.closed == 0 and not bench.executor.requests
