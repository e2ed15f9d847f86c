"""Loops whose iterations do not wait for each other run several in one pass, and equal one pass for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle, LoopSpec
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.transfers import gather
from mstar_core.graph import EngineHints
from mstar_core.layers.kv_view import AppendOnlyView, KVView
from tests.engine.recorded import RecordingCache, captured_kinds
from tests.engine.test_kv_candidates import closes, near, roll
from tests.engine.tiny_engine import WIDTH, Driver
from tests.engine.tiny_world import FRAME, PATCHES, WORLD, TinyWorld, make_world, numbers

TAUGHT = replace(
    WORLD,
    ports={**WORLD.ports, "frames": f"f32[t,{PATCHES},{WIDTH}]"},
    row_ports=(*WORLD.row_ports, "frames"),
    step_ports=("frames", "actions"),
    hints=EngineHints(capture_sizes=(1, 2, 4, 8)),
)


class Taught(TinyWorld):
    """A world that also takes known frames; of a list per step it gets the entry of its pass."""

    def forward(  # type: ignore[override]  # its ports are others
        self,
        kv: KVView,
        positions: Tensor,
        step: Tensor,
        actions: Tensor,
        frame: Tensor | None = None,
        frames: Tensor | None = None,
    ) -> dict[str, Tensor]:
        assert actions.shape[1:] == (1, WIDTH)
        own = frames[:, 0] if frames is not None else frame
        assert own is not None
        return super().forward(kv, positions, torch.zeros_like(step), own, actions)


def taught(captures: GraphCache | None = None, **changes: Any) -> tuple[KVCacheEngine, Taught]:
    module = Taught()
    graphs = () if captures is None else (1,)
    settings: dict[str, Any] = {"spec": TAUGHT, "module": module, "graphs": graphs, "captures": captures}
    return make_world(**{**settings, "num_pages": 64, **changes}), module


def show(driver: Driver, handle: int, count: int, emit: tuple[str, ...] = (), entries: int | None = None) -> int:
    """Known frames and actions, which the engine iterates alone."""
    inputs = {"frames": numbers(70, entries or count, PATCHES, WIDTH), "actions": numbers(71, 9, WIDTH)}
    loop = LoopSpec(max_iters=count, fused=True, emit=emit)
    return driver.submit(handle, inputs=inputs, attend=FRAME, sample=False, loop=loop)


def rolled(engine: KVCacheEngine, count: int, emit: tuple[str, ...] = ()) -> Tensor:
    """Last frames of three candidates behind so many known frames."""
    driver = Driver(engine)
    driver.open(0, max_tokens=60)
    told = show(driver, 0, count, emit)
    driver.run()
    key = roll(driver, 0, numbers(72, 3, 4, WIDTH), 4)
    driver.run()
    assert not driver.failed, driver.failed
    assert driver.done[told].iterations == count
    engine.close(Handle(0))
    assert engine.memory().pages_used == 0
    return driver.done[key].outputs["next_frame"]


@pytest.mark.parametrize("page_size", [PATCHES, 4])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_known_frames_are_computed_in_one_pass(count: int, page_size: int) -> None:
    engine, module = taught(page_size=page_size)
    found = rolled(engine, count)
    assert module.passes == [count, 3, 3, 3, 3]
    single, apart = taught(page_size=page_size)
    near(found, rolled(single, count, emit=("norm",)))
    assert apart.passes == [1] * count + [3] * 4, "a loop that emits gets one pass per iteration"


def test_captured_passes_hold_several_iterations_too() -> None:
    engine, module = taught(RecordingCache())
    expected = rolled(engine, 7)
    while engine.idle():
        pass
    before, hits = len(module.passes), engine.counters()["graph_hits"]
    near(rolled(engine, 7), expected)
    assert module.passes[before:] == [7, 4, 4, 4, 4] and engine.counters()["graph_hits"] == hits + 5
    near(rolled(engine, 5), rolled(taught()[0], 5))
    assert len(captured_kinds(engine)) == 3, "lists of any length share one: of frames, of candidates, ahead"


def test_passes_without_wanted_outputs_use_a_silent_view() -> None:
    """Captured passes of known frames, but not those that emit frames, nor candidates."""
    engine, module = taught(RecordingCache())
    found: list[tuple[int, bool]] = []
    forward = module.forward

    def watched(kv: KVView, **given: Any) -> dict[str, Tensor]:
        made = forward(kv=kv, **given)
        found.append((len(given["actions"]), isinstance(kv, AppendOnlyView)))
        return {} if isinstance(kv, AppendOnlyView) else made

    module.forward = watched  # type: ignore[method-assign, assignment]
    for emit in ((), ("norm",)):
        rolled(engine, 4, emit)
        while engine.idle():
            pass
    found.clear()
    near(rolled(engine, 4), rolled(taught()[0], 4))
    assert found[0] == (4, True) and not any(is_append_only for _, is_append_only in found[1:])
    found.clear()
    near(rolled(engine, 4, ("norm",)), rolled(taught()[0], 4))
    assert not any(is_append_only for _, is_append_only in found)


def test_contexts_of_the_first_lengths_are_not_padded() -> None:
    """Requests bring the same number of known frames each time; other lengths take the next larger bucket."""
    engine, module = taught(RecordingCache(), spec=replace(TAUGHT, hints=EngineHints(capture_sizes=(1, 2, 8))))
    ran = {}
    for count in (7, 5, 6, 4, 7, 5, 6, 4, 8):
        before = len(module.passes)
        near(rolled(engine, count), rolled(taught()[0], count))
        ran[count] = module.passes[before]
        while engine.idle():
            pass
    assert ran == {7: 7, 5: 5, 6: 7, 4: 5, 8: 8}


def test_known_frames_take_only_their_own_pages() -> None:
    engine, _ = taught(RecordingCache())
    driver = Driver(engine)
    driver.open(0, max_tokens=60)
    show(driver, 0, 4)
    driver.run()
    assert engine.memory().pages_used == 4


def test_frames_that_exceed_every_bucket_take_several_passes() -> None:
    engine, module = taught(RecordingCache(), spec=replace(TAUGHT, hints=EngineHints(capture_sizes=(1, 2))))
    rolled(engine, 5)
    assert module.passes[:3] == [2, 2, 1]


def test_requests_compute_their_frames_in_one_batch() -> None:
    engine, module = taught(RecordingCache())
    rolled(engine, 2)
    while engine.idle():
        pass
    driver, keys = Driver(engine), {}
    for handle in range(3):
        driver.open(handle, max_tokens=60)
        show(driver, handle, 2 + handle)
    before = len(module.passes)
    driver.run()
    assert module.passes[before:] == [8, 4], "two and three rows in one bucket, then four"
    for handle in range(3):
        keys[handle] = roll(driver, handle, numbers(72, 3, 4, WIDTH), 4)
    driver.run()
    for handle in range(3):
        near(driver.done[keys[handle]].outputs["next_frame"], rolled(taught()[0], 2 + handle))


def test_frames_of_a_preempted_request_equal_an_undisturbed_run() -> None:
    engine, _ = taught(num_pages=16, max_slots=24)
    driver = Driver(engine)
    for handle in range(3):
        driver.open(handle, max_tokens=24)
        show(driver, handle, 4)
    driver.run()
    keys = {handle: roll(driver, handle, numbers(72, 3, 4, WIDTH), 4) for handle in range(3)}
    for handle, key in keys.items():
        driver.on_done[key] = closes(driver, handle)
    driver.run()
    assert not driver.failed and engine.memory().preempted > 0
    for key in keys.values():
        near(driver.done[key].outputs["next_frame"], rolled(taught()[0], 4))


def test_a_list_that_ends_before_its_loop_is_named() -> None:
    engine, _ = taught()
    driver = Driver(engine)
    driver.open(0, max_tokens=60)
    key = show(driver, 0, 5, entries=4)
    driver.run()
    assert "'frames'" in str(driver.failed[key].error) and "4 entries" in driver.failed[key].error.detail


def test_captured_candidates_enter_by_the_batch_whatever_the_budget() -> None:
    """The budget keeps steps short for decode batches; a node of rollouts has none."""
    engine, module = taught(RecordingCache(), token_budget=2 * PATCHES)
    expected = rolled(engine, 1)
    while engine.idle():
        pass
    before = len(module.passes)
    near(rolled(engine, 1), expected)
    assert module.passes[before:] == [1, 4, 4, 4, 4]


def test_candidates_that_emit_together_stay_together() -> None:
    """With more candidates than a captured batch holds, each iteration is emitted before any candidate goes on."""
    engine, _ = taught(RecordingCache(), spec=replace(TAUGHT, hints=EngineHints(capture_sizes=(1, 2, 4))))
    rolled(engine, 1)
    while engine.idle():
        pass
    driver, told = Driver(engine), []
    driver.open(0, max_tokens=60)
    key = roll(driver, 0, numbers(72, 6, 4, WIDTH), 4, emit=("norm",))
    while key not in driver.done:
        driver.turn()
        told.append(len(driver.emissions.get(key, [])))
    assert told == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["even", "same", "apart", "one", "backwards", "strided"])
def test_gather_stacks_values_of_any_layout(kind: str) -> None:
    whole = numbers(1, 5, 2, 3)
    values = {
        "even": whole.unbind(0)[1:4],
        "same": [whole[2]] * 3,
        "apart": [whole[0], whole[1], whole[4].clone()],
        "one": [whole[3]],
        "backwards": [whole[2], whole[1], whole[0]],
        "strided": list(whole.mT.unbind(0)[::2]),
    }[kind]
    into = torch.empty(len(values), *values[0].shape)
    gather(values, into)
    assert torch.equal(into, torch.stack(list(values)))
