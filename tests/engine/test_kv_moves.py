"""Caches that move between engines: exported here, imported there, with the same ids as in one engine."""

from __future__ import annotations

import pytest
import torch

from mstar_core.engine.base import CacheState, Export, Handle
from mstar_core.errors import EngineError
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.tiny_engine import Driver, make_engine, prompt, reference

PENALISED = SamplingParams(
    temperature=0.8, top_p=0.9, repetition_penalty=1.4, presence_penalty=2.0, frequency_penalty=2.0, seed=11
)


def export(driver: Driver, handle: int, branch: str = "main") -> CacheState:
    key = driver.submit(handle, branch=branch, move=Export())
    driver.run()
    assert key in driver.done, driver.failed
    cache = driver.done[key].cache
    assert cache is not None
    return cache


def bring(driver: Driver, handle: int, state: CacheState, branch: str = "main") -> None:
    key = driver.submit(handle, branch=branch, move=state)
    driver.run()
    assert key in driver.done, driver.failed


def moved_ids(
    ids: list[int], steps: int, sampling: SamplingParams, source: Driver, target: Driver, handle: int = 1
) -> list[int]:
    """Ids of a prompt that `source` reads and `target` goes on with."""
    source.open(handle, sampling)
    target.open(handle, sampling)
    first = source.prefill(handle, ids)
    source.run()
    bring(target, handle, export(source, handle))
    loop = target.decode(handle, steps)
    target.run()
    assert not source.failed and not target.failed
    return [int(source.done[first].outputs["token"]), *target.ids[loop]]


def assert_empty(*drivers: Driver) -> None:
    for driver in drivers:
        for handle in range(10):
            driver.engine.close(Handle(handle))
        use = driver.engine.memory()
        assert (use.pages_used, use.slots_used) == (0, 0)


PAGE_ENDS = [page + beside for page in (4, 8, 12) for beside in (-1, 0, 1)]
"""Lengths about the ends of the first three pages."""


@pytest.mark.parametrize("length", [1, *PAGE_ENDS, 17])
@pytest.mark.parametrize("sampling", [SamplingParams(), PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_ids_after_a_move_equal_those_of_one_engine(lookahead: int, sampling: SamplingParams, length: int) -> None:
    source = Driver(make_engine(lookahead=lookahead), lookahead)
    target = Driver(make_engine(lookahead=lookahead), lookahead)
    ids = prompt(3, length)
    assert moved_ids(ids, 12, sampling, source, target) == reference(ids, 12, sampling)
    assert source.engine.memory().pages_used == 0, "the source keeps nothing"
    assert_empty(source, target)


def test_a_cache_moves_there_and_back() -> None:
    one, other = Driver(make_engine()), Driver(make_engine())
    ids = prompt(5, 9)
    for driver in (one, other):
        driver.open(1, PENALISED)
    first = one.prefill(1, ids)
    one.run()
    bring(other, 1, export(one, 1))
    begun = other.decode(1, 5)
    other.run()
    bring(one, 1, export(other, 1))
    ended = one.decode(1, 6)
    one.run()
    found = [int(one.done[first].outputs["token"]), *other.ids[begun], *one.ids[ended]]
    assert found == reference(ids, 11, PENALISED)
    assert_empty(one, other)


def test_a_preempted_cache_is_recomputed_before_it_leaves() -> None:
    source, target = Driver(make_engine(num_pages=8)), Driver(make_engine())
    ids = prompt(7, 20)
    source.open(1, max_tokens=32)
    source.open(2, max_tokens=32)
    target.open(2)
    first = source.prefill(2, ids)
    source.run()
    long = source.prefill(1, prompt(8, 28))  # older, so it takes the pages of request 2
    source.run()
    assert long in source.done and source.engine.memory().preempted == 1
    source.engine.close(Handle(1))
    bring(target, 2, export(source, 2))
    loop = target.decode(2, 8)
    target.run()
    assert [int(source.done[first].outputs["token"]), *target.ids[loop]] == reference(ids, 8)
    assert_empty(source, target)


def test_a_cache_that_came_waits_for_pages_and_survives_a_preemption() -> None:
    source, target = Driver(make_engine()), Driver(make_engine(num_pages=12, prefix_cache=False))
    prompts = [prompt(seed, 14) for seed in range(4)]
    firsts = {}
    for handle, ids in enumerate(prompts):
        source.open(handle)
        target.open(handle, max_tokens=40)
        firsts[handle] = source.prefill(handle, ids)
    source.run()
    loops = {}
    for handle in range(4):
        target.submit(handle, move=export(source, handle))
        loops[handle] = target.decode(handle, 16)
    target.run()
    assert not target.failed
    assert target.engine.memory().preempted > 0, "the pool must be too small for all four"
    for handle, ids in enumerate(prompts):
        found = [int(source.done[firsts[handle]].outputs["token"]), *target.ids[loops[handle]]]
        assert found == reference(ids, 16), handle
    assert_empty(source, target)


def test_a_fork_leaves_and_its_source_stays() -> None:
    source, target = Driver(make_engine()), Driver(make_engine())
    ids = prompt(9, 10)
    source.open(1)
    target.open(1)
    source.prefill(1, ids)
    source.run()
    source.engine.fork(Handle(1), "main", "side")
    bring(target, 1, export(source, 1, "side"), "side")
    here, there = source.decode(1, 7), target.decode(1, 7, branch="side")
    source.run()
    target.run()
    assert source.ids[here] == target.ids[there] == reference(ids, 7)[1:]
    assert_empty(source, target)


def test_an_empty_branch_moves() -> None:
    source, target = Driver(make_engine()), Driver(make_engine())
    source.open(1)
    target.open(1)
    state = export(source, 1, "side")
    assert (state.length, state.pages) == (0, ())
    bring(target, 1, state, "side")
    assert_empty(source, target)


def test_a_cache_of_another_form_fails_its_request_alone() -> None:
    source, target = Driver(make_engine(page_size=8)), Driver(make_engine())
    source.open(1)
    source.prefill(1, prompt(1, 9))
    source.run()
    target.open(1)
    target.open(2)
    ids = prompt(2, 6)
    beside = target.prefill(2, ids)
    key = target.submit(1, move=export(source, 1))
    target.run()
    assert isinstance(target.failed[key].error, EngineError)
    assert int(target.done[beside].outputs["token"]) == reference(ids, 1)[0]
    assert_empty(source, target)


def test_staging_is_one_tensor_per_group_of_layers() -> None:
    source = Driver(make_engine())
    source.open(1)
    source.prefill(1, prompt(1, 9))
    source.run()
    (group,) = export(source, 1).pages
    assert (group.shape, group.is_contiguous()) == (torch.Size([2, 3, 2, 4, 2, 8]), True)
    assert_empty(source)
