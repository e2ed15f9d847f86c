"""A run that finishes its request: the api hears of the end with the last outputs."""

from __future__ import annotations

import numpy as np
import pytest

from mstar_core.messages.flow import Outputs
from mstar_core.messages.requests import RequestFinished
from mstar_core.messages.work import OpenRequest, RunWalk, RunWalks, WalkDone
from mstar_core.transport.tensors import inline
from tests.worker.test_executor import STOP, Bench, ids


def finished(bench: Bench) -> list[RequestFinished]:
    return [end for message in bench.post.of(Outputs) for end in message.finished]


def read(bench: Bench, handle: int, *, finishes: bool, opens: bool = False) -> None:
    """A request that is nothing but a prefill."""
    opened = OpenRequest(handle=handle, params={}, seed=1, homes={"LLM": 0, "snac_decoder": 0}, max_tokens=100)
    run = RunWalk(run=1, walk="prefill", inputs={"tokens": inline(np.arange(5), None)}, finishes=finishes)
    message = RunWalks(handle=handle, partition="LLM", runs=[run], opens=opened if opens else None)
    if not opens:
        bench.executor.open(opened)
    bench.executor.run(message)
    bench.turns()


@pytest.mark.parametrize("opens", [False, True])
def test_the_end_goes_to_the_api_and_the_conductor_hears_that_it_did(opens: bool) -> None:
    bench = Bench({1: [*ids(3), STOP]})
    read(bench, 1, finishes=True, opens=opens)
    assert finished(bench) == [RequestFinished(handle=1, reason="stop")]
    assert [(done.run, done.is_told) for done in bench.post.of(WalkDone)] == [(1, True)]


def test_without_the_word_nothing_is_told() -> None:
    bench = Bench({1: [*ids(3), STOP]})
    read(bench, 1, finishes=False)
    assert not finished(bench) and not any(done.is_told for done in bench.post.of(WalkDone))


def test_the_end_says_what_all_runs_did() -> None:
    bench = Bench({1: [*ids(28), STOP]})
    bench.open(1)
    bench.walk(1, "LLM", 2, "prefill", inputs={"tokens": inline(np.arange(5), None)})
    bench.turns()
    bench.walk(1, "LLM", 3, "decode", max_iters=99, finishes=True)
    bench.turns()
    counts: dict[str, int] = {}
    for done in bench.post.of(WalkDone):
        counts |= done.counts
    [end] = finished(bench)
    assert (dict(end.counts), end.emitted) == (counts, {}) and counts


def test_a_request_that_was_closed_finishes_nothing() -> None:
    bench = Bench({1: [*ids(3), STOP]})
    bench.open(1)
    bench.walk(1, "LLM", 1, "prefill", inputs={"tokens": inline(np.arange(5), None)}, finishes=True)
    bench.executor.close(bench.executor.requests[1].handle)  # type: ignore[index]
    bench.turn()
    assert not finished(bench)
