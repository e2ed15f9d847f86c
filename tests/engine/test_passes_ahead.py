"""Replays that run several iterations of a loop ahead of the host give what one replay for each gives."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle
from mstar_core.engine.cuda_graphs.kinds import POSITIONS, PortForm, StepFamily, StepKind
from mstar_core.engine.cuda_graphs.passes import loop_items
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.steps.device import AHEAD
from mstar_core.graph import EngineHints
from tests.engine.recorded import Recorded, RecordingCache, captured_kinds
from tests.engine.test_kv_candidates import context, near, roll
from tests.engine.test_kv_iterations_ahead import TAUGHT, Taught
from tests.engine.test_passes_loops import ROLLING, captured
from tests.engine.tiny_engine import WIDTH, Driver
from tests.engine.tiny_world import PATCHES, TRIAL, TinyWorld, make_world, numbers

WORLDS: dict[str, Any] = {
    "lists of steps": {"spec": replace(TAUGHT, hints=EngineHints(capture_sizes=(1, 4))), "module": Taught},
    "whole lists": {"spec": replace(ROLLING, hints=EngineHints(capture_sizes=(1, 4))), "module": TinyWorld},
}


def engine_of(captures: RecordingCache | None, lookahead: int = 0, **changes: Any) -> KVCacheEngine:
    settings = {**WORLDS["lists of steps"], "num_pages": 64, "max_seq_len": 48, **changes}
    settings["module"] = settings["module"]()
    graphs = () if captures is None else (1,)
    return make_world(captures=captures, graphs=graphs, lookahead=lookahead, **settings)


MOST, FEW = AHEAD
STEPS = 2 * MOST + FEW


def replays(captures: RecordingCache) -> int:
    return sum(graph.replays for graph in captures.graphs)


def ready(lookahead: int = 0, **changes: Any) -> tuple[KVCacheEngine, RecordingCache]:
    """An engine that has captured what rollouts of one to six rows need."""
    captures = RecordingCache()
    engine = engine_of(captures, lookahead, **changes)
    for number in range(2):  # the second meets kinds of which the first took what was there
        driver = Driver(engine, lookahead)
        begin(driver, 90 + number, 1, STEPS)
        driver.run()
        engine.close(Handle(90 + number))
        captured(engine)
    return engine, captures


def begin(driver: Driver, handle: int, rows: int, steps: int, **fields: Any) -> int:
    driver.open(handle, max_tokens=48)
    context(driver, handle, 1 + handle % 2)
    return roll(driver, handle, numbers(handle, rows, steps, WIDTH), steps, **fields)


def alone(handle: int, rows: int, steps: int, **changes: Any) -> list[Tensor]:
    """Every frame of a rollout of its own, without graphs."""
    fields = {"attend": changes.pop("attend")} if "attend" in changes else {}
    driver = Driver(engine_of(None, **changes))
    key = begin(driver, handle, rows, steps, emit=("next_frame",), **fields)
    driver.run()
    return [item.outputs["next_frame"] for item in driver.emissions[key]]


def ahead(engine: KVCacheEngine) -> list[StepKind]:
    return [kind for kind in captured_kinds(engine, StepFamily.LOOP) if kind.runs_ahead]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("rows", [1, 3])
def test_rollouts_of_any_length_equal_plain_ones(rows: int, lookahead: int) -> None:
    engine, captures = ready(lookahead)
    assert [kind.iterations for kind in ahead(engine)] == [MOST, FEW]
    for steps, least in ((1, 1), (FEW, 1), (MOST - 1, 2), (MOST, 1), (MOST + 1, 2), (2 * MOST + FEW + 1, 4)):
        driver = Driver(engine, lookahead)
        driver.open(0, max_tokens=48)
        before = replays(captures)
        key = roll(driver, 0, numbers(steps, rows, steps, WIDTH), steps)
        driver.run()
        assert replays(captures) - before == least
        assert driver.done[key].iterations == steps
        other = Driver(engine_of(None))
        other.open(0, max_tokens=48)
        expected = roll(other, 0, numbers(steps, rows, steps, WIDTH), steps)
        other.run()
        near(driver.done[key].outputs["next_frame"], other.done[expected].outputs["next_frame"])
        engine.close(Handle(0))
        assert engine.memory().pages_used == 0


def test_lists_that_a_module_indexes_itself_stay_whole() -> None:
    engine, captures = ready(**WORLDS["whole lists"])
    driver, before = Driver(engine), replays(captures)
    key = begin(driver, 2, 1, STEPS)
    driver.run()
    near(driver.done[key].outputs["next_frame"], alone(2, 1, STEPS, **WORLDS["whole lists"])[-1])
    assert replays(captures) - before == 4, "one of the context"


@pytest.mark.parametrize(("positions", "page_size"), [("shared", PATCHES), ("shared", 2), ("running", 5)])
def test_positions_and_pages_advance_within_a_replay(positions: Any, page_size: int) -> None:
    attend = replace(TRIAL, positions=positions)
    engine, captures = ready(page_size=page_size)
    driver = Driver(engine)
    before = replays(captures)
    key = begin(driver, 2, 1, STEPS, attend=attend)
    driver.run()
    near(driver.done[key].outputs["next_frame"], alone(2, 1, STEPS, attend=attend, page_size=page_size)[-1])
    assert replays(captures) - before == 4, "one of the context"


@pytest.mark.parametrize(("rows", "lookahead"), [(1, 1), (2, 0)])
def test_each_iteration_is_emitted_and_the_first_in_a_step_of_its_own(lookahead: int, rows: int) -> None:
    """The client gets the first iteration as early as without replays ahead, later ones one replay at a time."""
    engine, _ = ready(lookahead)
    driver, steps = Driver(engine, lookahead), STEPS
    key = begin(driver, 3, rows, steps, emit=("next_frame",))
    driver.run()
    told = driver.emissions[key]
    assert [item.iteration for item in told] == list(range(steps))
    for item, expected in zip(told, alone(3, rows, steps), strict=True):
        near(item.outputs["next_frame"], expected)
    assert [len(each.emissions) for each in driver.results if each.emissions] == [1, MOST, MOST, 1]


def test_an_emitting_loop_does_not_run_ahead_of_waiting_requests() -> None:
    """Two emitting requests join one batch whenever the second arrives, and stay together."""
    engine, _ = ready()
    driver = Driver(engine)
    first = begin(driver, 4, 1, 12, emit=("next_frame",))
    while len(driver.emissions.get(first, [])) < 1:
        driver.turn()
    second = begin(driver, 5, 1, 12, emit=("next_frame",))
    driver.run()
    for key, handle in ((first, 4), (second, 5)):
        for item, expected in zip(driver.emissions[key], alone(handle, 1, 12), strict=True):
            near(item.outputs["next_frame"], expected)
    sizes = [len(each.emissions) for each in driver.results]
    assert 2 * MOST in sizes, "both run ahead together"


def test_a_request_closed_during_a_replay_leaves_nothing() -> None:
    engine, _ = ready(1)
    driver = Driver(engine, 1)
    gone = begin(driver, 6, 1, 12, emit=("next_frame",))
    while len(driver.emissions.get(gone, [])) < 1 + MOST:
        driver.turn()
    engine.close(Handle(6))
    key = begin(driver, 7, 1, 12)
    driver.run()
    near(driver.done[key].outputs["next_frame"], alone(7, 1, 12)[-1])
    assert gone not in driver.done
    engine.close(Handle(7))
    assert engine.memory().pages_used == 0 == engine.memory().slots_used


@pytest.mark.parametrize(("left", "told"), [(1, 1), (FEW + 1, FEW), (MOST, MOST)])
def test_kv_iterations_ahead_preempt_no_request(left: int, told: int) -> None:
    """As many run ahead as there are pages for, and the neighbour keeps its own."""
    engine, _ = ready(num_pages=16)
    driver = Driver(engine)
    driver.open(0, max_tokens=12)
    context(driver, 0, 1)
    driver.run()
    begin(driver, 2, 1, 12, emit=("next_frame",))
    for _ in range(3):
        driver.turn()
    used = 1 + 1 + 1 + MOST
    assert engine.memory().pages_used == used, "an idle one, a context, and the emitted iteration"
    assert used + left == 16 or engine._memory.tables.pool.allocate(16 - used - left)  # taken by another owner
    driver.turn()
    assert len(driver.results[-1].emissions) == told
    assert engine.memory().pages_used == 16 - left + told and engine.memory().preempted == 0


@pytest.mark.parametrize("seed", range(4))
def test_results_are_the_same_under_pressure(seed: int) -> None:
    """Requests that arrive at any time, emit or not, and preempt each other."""
    chance = random.Random(seed)
    engine, _ = ready(num_pages=16, max_slots=16)
    driver, asked = Driver(engine), {}
    for handle in range(6):
        rows, steps = chance.choice([1, 1, 1, 2]), chance.randint(5, 10)
        fields = {"emit": ("next_frame",)} if chance.random() < 0.7 else {}
        asked[begin(driver, handle, rows, steps, **fields)] = (handle, rows, steps)
        for _ in range(chance.randint(0, 2)):
            driver.turn()
    driver.run()
    for key in asked:
        engine.close(driver.done[key].job.handle)
    assert not driver.failed, driver.failed
    for key, (handle, rows, steps) in asked.items():
        expected = alone(handle, rows, steps)
        near(driver.done[key].outputs["next_frame"], expected[-1])
        for item, frame in zip(driver.emissions.get(key, []), expected, strict=False):
            near(item.outputs["next_frame"], frame)
    assert engine.memory().preempted > 0 and engine.memory().pages_used == 0


def test_a_loop_that_runs_ahead_is_recomputed_after_a_preemption() -> None:
    """An older one of another kind takes pages one by one, and preempts a younger one that runs ahead."""
    engine, _ = ready(num_pages=17)
    driver, other = Driver(engine), Driver(engine_of(None))
    found = []
    for each in (driver, other):
        each.open(9, max_tokens=12)
        context(each, 9, 3)
        each.run()  # three pages of one that rests
        for handle in (0, 1):
            each.open(handle, max_tokens=36)
        actions = numbers(8, 2, 1, STEPS, WIDTH)
        asking = roll(each, 0, actions[0].half(), STEPS, loop={"stop_port": "never"})
        found.append((asking, roll(each, 1, actions[1], STEPS)))
        each.run()
    assert engine.memory().preempted > 0
    for mine, plain in zip(*found, strict=True):
        near(driver.done[mine].outputs["next_frame"], other.done[plain].outputs["next_frame"])


def test_a_replay_ahead_without_memory_for_its_outputs_runs_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = ready()
    failures, replay = iter([False, True]), Recorded.replay

    def full(graph: Recorded) -> None:
        replay(graph)
        if len(graph.outputs) == MOST and next(failures, False):  # of a replay of so many iterations
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Recorded, "replay", full)
    driver = Driver(engine)
    keys = {begin(driver, handle, 1, STEPS, emit=("next_frame",)): handle for handle in (2, 3)}
    driver.run()
    for key, handle in keys.items():
        for item, expected in zip(driver.emissions[key], alone(handle, 1, STEPS), strict=True):
            near(item.outputs["next_frame"], expected)
        engine.close(Handle(handle))
    assert next(failures, None) is None and engine.memory().pages_used == 0


def test_only_small_batches_run_ahead() -> None:
    """In a large batch, host time between iterations is hidden, and other requests should be able to join."""
    positions = PortForm(POSITIONS, torch.int64, 0, ())
    frame = StepKind(family=StepFamily.LOOP, item_tokens=258, ports=(), positions=positions, causal=False)
    rows = [1, 2, 4, 8, 16, 32, 64, 128]
    sizes = [loop_items(replace(frame, iterations=count), rows) for count in (MOST, FEW, 1)]
    assert sizes == [[1, 2], [1, 2, 4], rows]
