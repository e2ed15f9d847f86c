"""Candidates of a KV node: each has a cache of its own and equals a request of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Done, Handle, LoopSpec
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.scheduling.sequence import CandidateGroup
from mstar_core.errors import ConfigError, EngineError, TooLarge
from mstar_core.graph.declare.nodes import MAIN, Attend
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.tiny_engine import LM, VOCAB, WIDTH, Driver, make_engine, prompt
from tests.engine.tiny_world import FRAME, PATCHES, TRIAL, WORLD, TinyWorld, make_world, numbers

START = numbers(1, PATCHES, WIDTH)
CARRY = {"next_frame": "frame"}


def context(driver: Driver, handle: int, frames: int = 2) -> None:
    """Known frames, from which every candidate continues."""
    for step in range(frames):
        driver.submit(
            handle,
            inputs={
                "frame": numbers(50 + step, PATCHES, WIDTH),
                "actions": numbers(60, 4, WIDTH),
                "$step": torch.tensor(step),
            },
            attend=FRAME,
            sample=False,
        )


def roll(driver: Driver, handle: int, actions: Tensor, steps: int, **fields: Any) -> int:
    """A rollout of candidates [K, h, WIDTH] that the engine iterates alone."""
    loop = LoopSpec(max_iters=steps, carry=CARRY, fused=True, emit=fields.pop("emit", ()), **fields.pop("loop", {}))
    settings: dict[str, Any] = {"attend": TRIAL, "outputs": ("next_frame", "norm"), "sample": False, **fields}
    rows = settings.pop("rows", len(actions))
    value = actions if rows > 1 else actions[0]
    return driver.submit(handle, inputs={"frame": START, "actions": value}, rows=rows, loop=loop, **settings)


def alone(actions: Tensor, steps: int, frames: int = 2, attend: Attend = TRIAL) -> Tensor:
    """Last frames of candidates [K, h, WIDTH], each rolled out as a request of its own: [K, PATCHES, WIDTH]."""
    found = []
    for candidate in actions:
        driver = Driver(make_world(num_pages=256))
        driver.open(0, max_tokens=12)
        context(driver, 0, frames)
        key = roll(driver, 0, candidate[None], steps, attend=attend)
        driver.run()
        found.append(driver.done[key].outputs["next_frame"])
    return torch.stack(found)


def world(lookahead: int = 0, **changes: Any) -> tuple[Driver, TinyWorld]:
    module = TinyWorld()
    driver = Driver(make_world(module=module, lookahead=lookahead, **changes), lookahead)
    driver.open(0, max_tokens=12)
    context(driver, 0)
    driver.run()
    return driver, module


def closes(driver: Driver, handle: int, closed: set[int] | None = None) -> Callable[[Done], None]:
    """End a request when its job is done, as a program does, and note it."""

    def close(_: Done) -> None:
        driver.engine.close(Handle(handle))
        if closed is not None:
            closed.add(handle)

    return close


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("emit", [(), ("norm",)], ids=["within a step", "told step by step"])
def test_candidates_equal_each_alone_and_leave_only_the_context(emit: tuple[str, ...], lookahead: int) -> None:
    driver, module = world(lookahead)
    actions = numbers(2, 5, 3, WIDTH)
    used = driver.engine.memory()
    key = roll(driver, 0, actions, 3, emit=emit)
    driver.run()
    done = driver.done[key]
    near(done.outputs["next_frame"], alone(actions, 3))
    assert (done.reason, done.iterations, done.outputs["norm"].shape) == ("length", 3, (5,))
    assert driver.engine.memory() == used, "rows give back what they took"
    assert module.passes[2:] == [5, 5, 5], "all rows of an iteration share a forward"
    told = driver.emissions.get(key, [])
    assert [item.iteration for item in told] == ([0, 1, 2] if emit else [])
    assert all(item.outputs["norm"].shape == (5,) and item.job is done.job for item in told)


def test_an_emitting_loop_reports_each_iteration_when_it_ends() -> None:
    driver, _ = world()
    key = roll(driver, 0, numbers(2, 4, 3, WIDTH), 3, emit=("next_frame",))
    told = []
    while key not in driver.done:
        driver.turn()
        told.append(len(driver.emissions.get(key, [])))
    assert told == [1, 2, 3]


def test_context_is_shared_not_copied() -> None:
    driver, _ = world(num_pages=2 + 6 * 2)
    assert driver.engine.memory().pages_used == 2
    key = roll(driver, 0, numbers(2, 6, 2, WIDTH), 2)
    driver.run()
    assert key in driver.done and driver.engine.memory().preempted == 0


@pytest.mark.parametrize("page_size", [3, 4, 5])
def test_pages_partly_filled_by_the_context_are_copied_on_write(page_size: int) -> None:
    driver, _ = world(page_size=page_size, num_pages=128)
    actions = numbers(3, 4, 3, WIDTH)
    key = roll(driver, 0, actions, 3)
    driver.run()
    near(driver.done[key].outputs["next_frame"], alone(actions, 3))
    again = roll(driver, 0, actions[:1], 3)
    driver.run()
    near(driver.done[again].outputs["next_frame"], alone(actions[:1], 3)[0])


@pytest.mark.parametrize("settings", [{"num_pages": 2 + 2 * 3}, {"max_slots": 7}, {"token_budget": 6}], ids=str)
def test_candidates_that_exceed_the_memory_take_turns(settings: dict[str, int]) -> None:
    driver, module = world(**settings)
    actions = numbers(4, 17, 3, WIDTH)
    key = roll(driver, 0, actions, 3, emit=("norm",))
    driver.run()
    near(driver.done[key].outputs["next_frame"], alone(actions, 3))
    assert [item.iteration for item in driver.emissions[key]] == [0, 1, 2]
    near(driver.emissions[key][2].outputs["norm"], driver.done[key].outputs["norm"])
    assert max(module.passes) < 17
    assert sum(module.passes) == 2 + 17 * 3, "a row that has begun is not disturbed: nothing is computed twice"


@pytest.mark.parametrize("attend", [TRIAL, FRAME], ids=["for the loop", "that stay"])
@pytest.mark.parametrize("num_pages", [5, 6, 8, 11])
def test_candidates_of_open_ended_loops_preempt_each_other(num_pages: int, attend: Attend) -> None:
    driver, _ = world(num_pages=num_pages)
    actions = numbers(4, 3, 3, WIDTH)
    key = roll(driver, 0, actions, 3, loop={"stop_port": "never"}, emit=("norm",), attend=attend)
    driver.run()
    near(driver.done[key].outputs["next_frame"], alone(actions, 3, attend=attend))
    assert [item.iteration for item in driver.emissions[key]] == [0, 1, 2]


def test_single_passes_keep_their_candidates_until_the_loop_ends() -> None:
    """A loop over several nodes: its iterations are single jobs, with a scorer between them."""
    driver, _ = world()
    actions = numbers(5, 4, 3, WIDTH)
    for start in (START, START * 2):
        frame = start
        for step in range(3):
            key = driver.submit(
                0,
                inputs={"frame": frame, "actions": actions, "$step": torch.tensor(step)},
                attend=TRIAL,
                rows=4,
                outputs=("next_frame",),
                sample=False,
            )
            driver.run()
            frame = driver.done[key].outputs["next_frame"]
            assert driver.engine.memory().pages_used == 2 + 4 * (step + 1)
    driver.engine.end_loops(Handle(0))
    assert driver.engine.memory().pages_used == 2
    key = roll(driver, 0, actions, 3)
    driver.run()
    assert driver.done[key].outputs["next_frame"].shape == frame.shape


def test_candidates_of_single_passes_equal_each_alone() -> None:
    driver, _ = world(num_pages=2 + 4 * 3)
    actions, frame = numbers(5, 4, 3, WIDTH), START
    for step in range(3):
        key = driver.submit(
            0,
            inputs={"frame": frame, "actions": actions, "$step": torch.tensor(step)},
            attend=TRIAL,
            rows=4,
            outputs=("next_frame",),
            sample=False,
        )
        driver.run()
        frame = driver.done[key].outputs["next_frame"]
    near(frame, alone(actions, 3))


def test_lasting_candidates_continue_in_the_next_job_and_a_job_of_one_returns_to_the_branch() -> None:
    driver, _ = world()
    actions = numbers(6, 3, 4, WIDTH)
    first = roll(driver, 0, actions, 2, attend=FRAME)
    second = driver.submit(
        0,
        inputs={"actions": actions},
        rows=3,
        attend=FRAME,
        sample=False,
        outputs=("next_frame",),
        loop=LoopSpec(max_iters=2, carry=CARRY, fused=True),
    )
    driver.run()
    assert driver.engine.memory().pages_used == 2 + 3 * 4
    expected = []
    for candidate in actions:
        one, _ = world()
        roll(one, 0, candidate[None], 2, attend=FRAME)
        key = one.submit(
            0,
            inputs={"actions": candidate},
            attend=FRAME,
            sample=False,
            outputs=("next_frame",),
            loop=LoopSpec(max_iters=2, carry=CARRY, fused=True),
        )
        one.run()
        expected.append(one.done[key].outputs["next_frame"])
    assert driver.done[first].reason == "length"
    near(driver.done[second].outputs["next_frame"], torch.stack(expected))
    single = roll(driver, 0, actions[:1], 2)
    driver.run()
    near(driver.done[single].outputs["next_frame"], alone(actions[:1], 2)[0])
    assert driver.engine.memory().pages_used == 2


def test_candidates_of_several_requests_at_different_steps_share_forwards() -> None:
    module = TinyWorld()
    driver = Driver(make_world(module=module, num_pages=256, max_slots=24))
    keys = {}
    for handle in range(2):
        driver.open(handle, max_tokens=12)
        context(driver, handle, 1 + handle)
    driver.run()
    keys[0] = roll(driver, 0, numbers(7, 2, 4, WIDTH), 4, emit=("norm",))
    driver.turn()
    keys[1] = roll(driver, 1, numbers(8, 3, 2, WIDTH), 2, emit=("norm",))
    driver.run()
    near(driver.done[keys[0]].outputs["next_frame"], alone(numbers(7, 2, 4, WIDTH), 4, 1))
    near(driver.done[keys[1]].outputs["next_frame"], alone(numbers(8, 3, 2, WIDTH), 2, 2))
    assert 5 in module.passes, "two rows at their second step beside three at their first"


def test_preempted_candidates_equal_an_undisturbed_run() -> None:
    assert WORLD.kv is not None
    spec = replace(WORLD, kv=replace(WORLD.kv, rows=9))
    driver = Driver(make_world(spec=spec, num_pages=16, max_slots=24))
    for handle in range(3):
        driver.open(handle, max_tokens=12)
        context(driver, handle)
    stop = {"stop_port": "never"}  # the length of the loop is unknown, so no pages are reserved for it
    keys = {
        h: roll(driver, h, numbers(10 + h, 3, 3, WIDTH), 3, attend=FRAME, emit=("norm",), loop=stop) for h in range(3)
    }
    for handle, key in keys.items():
        driver.on_done[key] = closes(driver, handle)
    driver.run()
    assert driver.engine.memory().preempted > 0
    for handle, key in keys.items():
        near(driver.done[key].outputs["next_frame"], alone(numbers(10 + handle, 3, 3, WIDTH), 3, attend=FRAME))
    assert driver.engine.memory().pages_used == 0 and driver.engine.memory().slots_used == 0


def sampled(rows: int, num_pages: int = 64, **stop: Any) -> list[list[int]]:
    assert LM.kv is not None
    spec = replace(LM, kv=replace(LM.kv, rows=4))
    driver = Driver(make_engine(spec=spec, max_slots=20, num_pages=num_pages))
    driver.open(0, SamplingParams(temperature=1.5, seed=3), max_tokens=12)
    driver.prefill(0, prompt(2, 6))
    loop = LoopSpec(max_iters=6, carry={"token": "token"}, emit=("token",), fused=True, **stop)
    key = driver.submit(0, loop=loop, outputs=("token",), rows=rows)
    driver.run()
    assert not driver.failed, [str(each.error) for each in driver.failed.values()]
    if rows == 1:
        return [driver.ids[key]]
    drawn = torch.stack([item.outputs["token"].reshape(-1) for item in driver.emissions[key]])
    assert driver.done[key].outputs["token"].shape == (rows, 1)
    return drawn.T.tolist()


def test_sampled_candidates_differ_and_the_first_equals_a_plain_request() -> None:
    several = sampled(4)
    assert several[0] == sampled(1)[0]
    assert len({tuple(each) for each in several}) == 4 and several == sampled(4)


def test_ids_of_evicted_candidates_are_recomputed() -> None:
    """Their length is unknown, so no pages are reserved, and they preempt each other."""
    never = {"stop_port": "token", "stop_ids": (VOCAB,)}
    assert sampled(4, num_pages=7, **never) == sampled(4)


def test_candidates_that_stop_early_repeat_their_last_value() -> None:
    assert LM.kv is not None
    spec = replace(LM, kv=replace(LM.kv, rows=3))
    driver = Driver(make_engine(spec=spec, max_slots=20))
    driver.open(0)
    driver.prefill(0, [1], sample=False)
    plain = LoopSpec(max_iters=5, carry={"token": "token"}, stop_port="token", stop_ids=(VOCAB,), emit=("token",))
    starts = torch.tensor([[3], [4], [5]])
    key = driver.submit(0, inputs={"token": starts}, loop=plain, outputs=("token",), rows=3)
    driver.run()
    whole = torch.stack([item.outputs["token"].reshape(-1) for item in driver.emissions[key]]).T.tolist()
    driver.engine.close(Handle(0))
    driver.open(0)
    driver.prefill(0, [1], sample=False)
    stop = whole[1][1]
    loop = replace(plain, stop_ids=(stop,))
    key = driver.submit(0, inputs={"token": starts}, loop=loop, outputs=("token",), rows=3)
    driver.run()
    for row, told in enumerate(torch.stack([i.outputs["token"].reshape(-1) for i in driver.emissions[key]]).T.tolist()):
        cut = whole[row].index(stop) + 1 if stop in whole[row] else 5
        assert told == whole[row][:cut] + [whole[row][cut - 1]] * (len(told) - cut)
    done = driver.done[key]
    assert done.iterations == len(driver.emissions[key])


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"rows": 7, "attend": FRAME}, TooLarge, "holds 6 candidates at once, 7"),
        ({"rows": 5, "actions": 6}, EngineError, "one value per candidate"),
        ({"rows": 6, "attend": FRAME, "steps": 9}, TooLarge, "9 for each candidate are 56; the pool has 40"),
    ],
)
def test_impossible_jobs_are_refused_with_numbers(fields: dict[str, Any], error: type, words: str) -> None:
    driver, _ = world(num_pages=40)
    rows, steps = fields.pop("rows"), fields.pop("steps", 2)
    key = roll(driver, 0, numbers(1, fields.pop("actions", rows), 9, WIDTH), steps, rows=rows, **fields)
    driver.run()
    assert isinstance(driver.failed[key].error, error) and words in str(driver.failed[key].error)
    driver.engine.close(Handle(0))
    assert driver.engine.memory().pages_used == 0 and driver.engine.memory().slots_used == 0


def test_candidates_are_counted_when_a_request_is_opened() -> None:
    engine = make_world(num_pages=40)
    engine.open(Handle(1), SamplingParams(), max_tokens=6 * 12, rows=6)
    with pytest.raises(TooLarge, match="never fit"):
        engine.open(Handle(2), SamplingParams(), max_tokens=6 * 21, rows=6)
    with pytest.raises(TooLarge, match="6 candidates at once, 8"):
        engine.open(Handle(2), SamplingParams(), max_tokens=8, rows=8)
    with pytest.raises(ConfigError, match="7 slots"):
        make_world(max_slots=6)


def test_a_bad_candidate_fails_its_request_alone_and_once() -> None:
    bad: set[int] = set()

    def faults(handles: Any) -> None:
        if bad & {int(handle) for handle in handles}:
            raise ValueError("broken")

    driver = Driver(make_world(num_pages=128, max_slots=24, faults=faults))
    for handle in range(2):
        driver.open(handle, max_tokens=12)
        context(driver, handle)
    driver.run()
    bad.add(0)
    keys = [roll(driver, handle, numbers(3, 3, 2, WIDTH), 2) for handle in range(2)]
    driver.run()
    assert "broken" in str(driver.failed[keys[0]].error) and driver.failed[keys[0]].job.rows == 3
    near(driver.done[keys[1]].outputs["next_frame"], alone(numbers(3, 3, 2, WIDTH), 2))


def test_a_forked_branch_drops_its_earlier_candidates() -> None:
    assert WORLD.kv is not None
    spec = replace(WORLD, kv=replace(WORLD.kv, branches=(MAIN, "side")))
    driver = Driver(make_world(spec=spec, max_slots=30, num_pages=128))
    driver.open(0, max_tokens=12)
    context(driver, 0)
    roll(driver, 0, numbers(1, 3, 2, WIDTH), 2, branch="side", attend=FRAME)
    driver.run()
    driver.engine.fork(Handle(0), MAIN, "side")
    key = roll(driver, 0, numbers(1, 3, 2, WIDTH), 2, branch="side")
    driver.run()
    near(driver.done[key].outputs["next_frame"], alone(numbers(1, 3, 2, WIDTH), 2))


def engine_of(trial: random.Random) -> KVCacheEngine:
    return make_world(
        num_pages=trial.choice([24, 40, 200]),
        max_slots=trial.choice([12, 24]),
        lookahead=0,
        token_budget=trial.choice([6, 21, 64]),
        page_size=trial.choice([3, 4]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_candidates_steps_and_cancels_in_any_mixture_equal_each_alone(seed: int) -> None:
    trial = random.Random(seed)
    driver = Driver(engine_of(trial))
    plans, keys = {}, {}
    for handle in range(6):
        rows, steps = trial.choice([1, 1, 2, 4, 6]), trial.randint(1, 3)
        attend = trial.choice([TRIAL, TRIAL, FRAME]) if rows <= 3 else TRIAL
        plans[handle] = (numbers(100 + handle, rows, 3, WIDTH), steps, trial.randint(1, 2), attend)
    waiting, cancelled = list(plans), set(trial.sample(range(6), 2))
    closed: set[int] = set()
    for _ in range(4000):
        if waiting and trial.random() < 0.5:
            handle = waiting.pop(0)
            actions, steps, frames, attend = plans[handle]
            driver.open(handle, max_tokens=12)
            context(driver, handle, frames)
            emit = trial.choice([(), ("norm",)])
            keys[handle] = roll(driver, handle, actions, steps, attend=attend, emit=emit)
            driver.on_done[keys[handle]] = closes(driver, handle, closed)
        if cancelled and trial.random() < 0.1:
            handle = cancelled.pop()
            if handle in keys:
                closed.add(handle)
                driver.engine.close(Handle(handle))
        if not driver.turn() and not waiting:
            break
    assert not driver.failed, [str(each.error) for each in driver.failed.values()]
    assert set(plans) == closed, "every request ends"
    memory = driver.engine.memory()
    assert memory.pages_used == 0 and memory.slots_used == 0
    for handle, key in keys.items():
        if key in driver.done:
            actions, steps, frames, attend = plans[handle]
            expected = alone(actions, steps, frames, attend)
            near(driver.done[key].outputs["next_frame"], expected if len(actions) > 1 else expected[0])


def test_outputs_of_candidates_are_moved_to_their_place_as_they_end() -> None:
    """Hundreds of frames are never held twice."""
    seen: list[tuple[int, int]] = []
    store = CandidateGroup.store

    def watched(group: CandidateGroup, rows: list[int]) -> None:
        store(group, rows)
        assert all(not done.outputs for done in group.done.values())
        assert all("next_frame" not in group.last_values[row] for row in group.done)
        seen.append((len(group.done), group.filled["next_frame"]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CandidateGroup, "store", watched)
        driver = Driver(make_world(token_budget=2 * PATCHES))
        driver.open(0)
        context(driver, 0)
        actions = numbers(8, 6, 4, WIDTH)
        key = roll(driver, 0, actions, 3)
        driver.run()
    assert len(seen) > 1 and all(ended == filled for ended, filled in seen) and seen[-1] == (6, 6)
    assert driver.done[key].outputs["next_frame"].shape == (6, PATCHES, WIDTH)
