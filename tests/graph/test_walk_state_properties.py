"""Random walks on random placements, with events in any order, equal a plain interpreter."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_core.graph import CompiledWalk, compile_graph
from tests.graph.fake_ranks import Ranks
from tests.graph.random_walks import Interpreter, Maker, WalkPlan, Writer

seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int) -> tuple[WalkPlan, CompiledWalk]:
    plan = Maker(seed).plan()
    writer = Writer(plan, seed)
    streams = [*writer.streams.values(), writer.sink]
    return plan, compile_graph({"walk": writer.walk()}, streams)["walk"]


def ranks(plan: WalkPlan, walk: CompiledWalk, seed: int) -> Ranks:
    rng = random.Random(seed)
    count = rng.randint(1, 3)
    home = {task.index: rng.randrange(count) for task in walk.tasks}
    return Ranks(walk, home, seed, chunks=plan.chunks, max_iters=plan.limits, given=plan.given, branches=plan.branches)


@settings(max_examples=600, deadline=None)
@given(seeds, seeds)
def test_every_part_runs_exactly_once_per_iteration_with_the_right_values(seed: int, order: int) -> None:
    plan, walk = drawn(seed)
    expected = Interpreter(plan).run()
    actual = ranks(plan, walk, order).run()
    assert actual.firings == expected.firings
    assert sorted(actual.emitted) == sorted(expected.emitted)
    assert sorted(actual.streamed) == sorted(expected.streamed)
    assert {loop: count for loop, count in actual.counts.items() if count} == {
        loop: count for loop, count in expected.counts.items() if count
    }


@settings(max_examples=300, deadline=None)
@given(seeds, seeds)
def test_every_walk_ends_and_leaves_nothing_alive(seed: int, order: int) -> None:
    plan, walk = drawn(seed)
    actual = ranks(plan, walk, order).run()
    assert actual.ends.keys() == actual.states.keys()
    assert all(not store for store in actual.stores.values())
    assert all(state.alive == 0 for state in actual.states.values())


@settings(max_examples=150, deadline=None)
@given(seeds, seeds, seeds)
def test_the_order_of_delivery_and_the_placement_change_nothing(seed: int, one: int, other: int) -> None:
    plan, walk = drawn(seed)
    first, second = ranks(plan, walk, one).run(), ranks(plan, walk, other).run()
    assert first.firings == second.firings
    assert first.counts == second.counts


@settings(max_examples=300, deadline=None)
@given(seeds, seeds, st.integers(0, 40))
def test_cancelling_at_any_moment_frees_everything(seed: int, order: int, steps: int) -> None:
    plan, walk = drawn(seed)
    run = ranks(plan, walk, order)
    run.start()
    for _ in range(steps):
        if run.pool:
            run.step()
    run.pool = [event for event in run.pool if event[0] != "start"]
    run.cancel()
    assert all(not store for store in run.stores.values())
    while run.pool:
        run.step()
    assert all(not store for store in run.stores.values())
    assert run.ends.keys() == run.states.keys()
