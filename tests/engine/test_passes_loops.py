"""Passes in fixed shapes give what the plain forward gives. Nothing is captured on the CPU: tests/gpu does that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.attention.pytorch import TorchAttention
from mstar_core.engine.base import Handle, LoopSpec
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.cuda_graphs.kinds import POSITIONS, PortForm, StepFamily, StepKind
from mstar_core.engine.cuda_graphs.passes import items_taken, loop_items
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.graph.declare.nodes import STEP, Attend, EngineHints
from tests.engine.recorded import Recorded, RecordingCache, captured_kinds
from tests.engine.test_kv_candidates import CARRY, START, context, near, roll
from tests.engine.test_pytorch import PAGE
from tests.engine.tiny_engine import LM, WIDTH, Driver, make_engine, prompt
from tests.engine.tiny_world import FRAME, PATCHES, TRIAL, WORLD, TinyWorld, make_world, numbers

FLOWING = replace(LM, sampling=None, hints=EngineHints(capture_sizes=(1, 2, 4)))
ROLLING = replace(WORLD, hints=EngineHints(capture_sizes=(1, 2, 4)))
SIZES = [1, 2, 4, 8, 16, 32]
READ = Attend(mask="full", write=False)


def flow_engine(captures: GraphCache | None, **changes: Any) -> KVCacheEngine:
    graphs = () if captures is None else (1,)
    return make_engine(**({"spec": FLOWING, "vocab": 0, "graphs": graphs, "captures": captures} | changes))


def flow(driver: Driver, handle: int, steps: int = 5, tokens: int = 4, length: int | None = None) -> int:
    """A request: a prefix, then a loop that only reads it. Returns the loop's key."""
    driver.open(handle)
    ids = prompt(handle, 3 + 5 * handle if length is None else length)
    driver.prefill(handle, ids, sample=False, outputs=(), attend=Attend(mask="full"))
    loop = LoopSpec(max_iters=steps, carry={"latents_out": "latents"}, fused=True)
    return driver.submit(
        handle,
        inputs={"latents": numbers(handle, tokens, 32)},
        outputs=("latents_out", "velocity"),
        sample=False,
        loop=loop,
        attend=READ,
    )


def captured(engine: KVCacheEngine) -> None:
    while engine.idle():
        pass


def flows(
    engine: KVCacheEngine, handles: list[int], lookahead: int = 0, *, port: str = "latents_out", **changes: Any
) -> dict[int, Tensor]:
    """Several requests at once: by handle what each gave on a port."""
    driver = Driver(engine, lookahead)
    keys = {handle: flow(driver, handle, **changes) for handle in handles}
    driver.run()
    for handle in handles:
        engine.close(Handle(handle))
    assert not driver.failed, driver.failed
    assert all(driver.done[key].iterations == changes.get("steps", 5) for key in keys.values())
    return {handle: driver.done[key].outputs[port] for handle, key in keys.items()}


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("handles", [[0], [3], [0, 1, 2], [0, 1, 2, 3, 4, 5]])
def test_a_loop_that_reads_is_one_replay_and_equals_the_plain_one(handles: list[int], lookahead: int) -> None:
    captures = RecordingCache()
    engine = flow_engine(captures, lookahead=lookahead, token_budget=512)
    flows(engine, [0])
    assert engine.counters()["graph_hits"] == 0 and engine.counters()["graph_misses"] == 5
    captured(engine)
    # Three numbers of rows and six of pages, of a table of 24.
    assert len(captures.graphs) == 18 and TorchAttention([], PAGE).pass_pages(24) == [2, 3, 6, 12, 18, 24]
    found = flows(engine, handles, lookahead)
    expected = flows(flow_engine(None, token_budget=512), handles)
    for handle in handles:
        torch.testing.assert_close(found[handle], expected[handle], atol=1e-6, rtol=1e-5)
    replays = sum(graph.replays for graph in captures.graphs)
    assert replays == -(-len(handles) // 4), "all five iterations of all requests that fit"
    assert engine.counters()["graph_hits"] == replays and engine.counters()["graph_misses"] == 5
    assert engine.memory().pages_used == 0


def test_what_a_replay_gave_stays_when_the_next_one_runs() -> None:
    engine, plain = flow_engine(RecordingCache()), flow_engine(None)
    flows(engine, [0])
    captured(engine)
    first = flows(engine, [1])
    flows(engine, [2])
    near(first[1], flows(plain, [1])[1])


def test_the_smallest_bucket_that_holds_rows_and_pages_serves() -> None:
    captures = RecordingCache()
    engine = flow_engine(captures, token_budget=512)
    flows(engine, [0])
    captured(engine)
    (buckets,) = captured_kinds(engine, StepFamily.LOOP).values()
    flows(engine, [0, 1], length=25)  # seven pages of four tokens
    ran = [bucket for bucket, graph in zip(buckets, captures.graphs, strict=True) if graph.replays]
    assert ran == [(8, 2, 12)]


def test_only_the_buckets_that_are_there_serve_and_capturing_is_done_piece_by_piece() -> None:
    captures = RecordingCache()
    engine = flow_engine(captures, token_budget=512)
    flows(engine, [0])
    for _ in range(4):
        assert engine.idle()
    flows(engine, [0, 1])
    assert [graph.replays for graph in captures.graphs] == [2, 0, 0, 0], "one row at a time"
    flows(engine, [6])  # 33 tokens: nine pages
    assert [graph.replays for graph in captures.graphs] == [2, 0, 0, 1]


@pytest.mark.parametrize(("changes", "why"), [({"steps": 65}, "too long"), ({"tokens": 3}, "another kind")])
def test_other_loops_run_plainly_and_are_counted(changes: dict[str, Any], why: str) -> None:
    engine = flow_engine(RecordingCache())
    flows(engine, [0])
    captured(engine)
    found = flows(engine, [1], **changes)
    near(found[1], flows(flow_engine(None), [1], **changes)[1])
    assert engine.counters()["graph_hits"] == 0 and engine.counters()["graph_misses"] > 1, why


def test_a_module_that_cannot_be_captured_runs_plainly_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    captures = RecordingCache()
    captures.fails = RuntimeError("operation not permitted when stream is capturing")
    engine = flow_engine(captures)
    flows(engine, [0])
    captured(engine)
    assert "4 tokens beside the cache, 5 iterations, 2 pages and others of its kind run uncaptured" in caplog.text
    near(flows(engine, [1])[1], flows(flow_engine(None), [1])[1])
    assert engine.counters()["graph_misses"] == 10


def test_one_bucket_that_does_not_fit_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    captures = RecordingCache()
    engine = flow_engine(captures)
    flows(engine, [0])
    captures.fails = torch.OutOfMemoryError("tried to allocate")
    engine.idle()
    captures.fails = None
    captured(engine)
    assert len(captures.graphs) == 17 and "is left out" in caplog.text


def branches_at(engine: KVCacheEngine, step: int) -> dict[str, Tensor]:
    """One denoising step of both branches of one request, over prefixes of different lengths."""
    driver = Driver(engine)
    driver.open(0)
    for branch, length in (("main", 9), ("side", 4)):
        driver.prefill(0, prompt(length, length), sample=False, outputs=(), attend=Attend(mask="full"), branch=branch)
    driver.run()
    keys = {
        branch: driver.submit(
            0,
            inputs={"latents": numbers(5, 4, 32), STEP: torch.tensor(step)},
            outputs=("velocity",),
            sample=False,
            attend=READ,
            branch=branch,
        )
        for branch in ("main", "side")
    }
    driver.run()
    assert not driver.failed, driver.failed
    engine.close(Handle(0))
    return {branch: driver.done[key].outputs["velocity"] for branch, key in keys.items()}


def test_branches_of_one_request_share_a_captured_step() -> None:
    """The branches of guidance run in one replay although the worker iterates their loop."""
    cache = RecordingCache()
    engine = flow_engine(cache)
    branches_at(engine, 0)
    captured(engine)
    assert all(graph.replays == 0 for graph in cache.graphs)
    found, expected = branches_at(engine, 3), branches_at(flow_engine(None), 3)
    assert sum(graph.replays for graph in cache.graphs) == 1
    for branch in ("main", "side"):
        near(found[branch], expected[branch])
    assert not torch.allclose(found["main"], found["side"])


# -- loops that append -----------------------------------------------------------------------------------------------


def world_engine(captures: GraphCache | None, **changes: Any) -> KVCacheEngine:
    graphs = () if captures is None else (1,)
    return make_world(spec=ROLLING, module=TinyWorld(), graphs=graphs, captures=captures, **changes)


def rollouts(engine: KVCacheEngine, sets: dict[int, Tensor], lookahead: int = 0, **fields: Any) -> dict[int, Tensor]:
    """Candidates [K, h, WIDTH] of requests with contexts of different lengths, all at once."""
    driver, keys = Driver(engine, lookahead), {}
    for handle, actions in sets.items():
        driver.open(handle, max_tokens=12)
        context(driver, handle, 1 + handle % 3)
        keys[handle] = roll(driver, handle, actions, actions.shape[1], **fields)
    driver.run()
    assert not driver.failed, driver.failed
    for handle in sets:
        engine.close(Handle(handle))
    assert engine.memory().pages_used == 0
    return {handle: driver.done[key].outputs["next_frame"] for handle, key in keys.items()}


@pytest.mark.parametrize("lookahead", [0, 1])
def test_frames_that_are_appended_equal_the_plain_ones(lookahead: int) -> None:
    captures = RecordingCache()
    engine = world_engine(captures, lookahead=lookahead, num_pages=256)
    sets = {0: numbers(2, 1, 4, WIDTH), 1: numbers(3, 5, 4, WIDTH), 2: numbers(4, 3, 4, WIDTH)}
    rollouts(engine, sets, lookahead)
    captured(engine)
    hits = engine.counters()["graph_hits"]
    found = rollouts(engine, sets, lookahead)
    expected = rollouts(world_engine(None, num_pages=256), sets)
    for handle in sets:
        near(found[handle], expected[handle])
    # Contexts (1, 2 and 3 frames) and four iterations of nine rows, at most four rows to a replay.
    assert engine.counters()["graph_hits"] - hits >= 12
    assert {kind.writes for kind in captured_kinds(engine, StepFamily.LOOP)} == {True}


def test_a_replay_without_room_for_what_it_gives_is_computed_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = {handle: numbers(20 + handle, 3, 3, WIDTH) for handle in range(2)}
    engine = world_engine(RecordingCache())
    rollouts(engine, sets)
    captured(engine)
    before, failures, replay = engine.counters(), iter([True]), Recorded.replay

    def full_once(graph: Recorded) -> None:
        replay(graph)
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Recorded, "replay", full_once)
    found = rollouts(engine, sets)
    expected = rollouts(world_engine(None), sets)
    for handle in sets:
        near(found[handle], expected[handle])
    after = engine.counters()
    assert after["graph_misses"] == before["graph_misses"] + 1 and after["graph_hits"] > before["graph_hits"]


def test_each_iteration_is_told_from_a_replay_of_its_own() -> None:
    captures = RecordingCache()
    engine, told = world_engine(captures), []
    actions = numbers(5, 1, 4, WIDTH)
    for _ in range(2):
        driver = Driver(engine)
        driver.open(0, max_tokens=12)
        context(driver, 0)
        key = roll(driver, 0, actions, 4, emit=("next_frame",))
        driver.run()
        told.append([item.outputs["next_frame"] for item in driver.emissions[key]])
        engine.close(Handle(0))
        captured(engine)
    assert engine.counters()["graph_hits"] >= 4
    for each, replayed in zip(*told, strict=True):
        near(replayed, each)


def test_a_failed_frame_leaves_neighbours_and_graphs_as_they_are() -> None:
    engine = world_engine(RecordingCache())
    rollouts(engine, {0: numbers(2, 1, 4, WIDTH)})
    captured(engine)
    driver = Driver(engine)
    for handle in (0, 1):
        driver.open(handle, max_tokens=12)
        context(driver, handle)
    good = roll(driver, 0, numbers(2, 1, 4, WIDTH), 4)
    wrong = driver.submit(
        1,
        inputs={"frame": START, "actions": numbers(2, 2, WIDTH)},
        attend=TRIAL,
        outputs=("next_frame",),
        sample=False,
        loop=LoopSpec(max_iters=4, carry=CARRY, fused=True),
    )
    driver.run()
    assert good in driver.done and wrong in driver.failed, "two actions do not do for four frames"


def test_nothing_is_learned_where_no_sizes_are_declared() -> None:
    engine = make_world(graphs=(1,))
    driver = Driver(engine)
    driver.open(0, max_tokens=12)
    context(driver, 0)
    driver.run()
    assert not engine.idle() and engine.counters() == {}
    assert FRAME.tokens == PATCHES


def test_passes_that_bring_much_for_each_row_are_captured_for_few_rows() -> None:
    """A context of eight frames brings seven for each row, 10 MB: 128 rows of it would take 1.3 GB."""
    frame = PortForm("frame", torch.float32, None, (1, 256, 1408))
    step, positions = (PortForm(name, torch.int64, 0, ()) for name in ("step", POSITIONS))
    one = StepKind(family=StepFamily.LOOP, item_tokens=258, ports=(frame, step), positions=positions, causal=False)
    seven = replace(one, ports=(replace(frame, shape=(7, 256, 1408)), step))
    huge = replace(one, ports=(replace(frame, shape=(1000, 256, 1408)), step))
    rows = [1, 2, 4, 8, 16, 32, 64, 128]
    assert [loop_items(kind, rows) for kind in (one, seven, huge)] == [rows, [1, 2, 4, 8, 16], [1]]


@pytest.mark.parametrize(
    ("rows", "expected"), [(3, [4]), (5, [8]), (24, [16, 8]), (25, [32]), (32, [32]), (40, [32, 8])], ids=str
)
def test_padding_that_costs_more_than_a_replay_is_not_computed(rows: int, expected: list[int]) -> None:
    """Frames of 258 tokens: eight rows of them keep a device busy for longer than reading its weights does."""
    taken = []
    while rows > 0:
        taken.append(items_taken(rows, 258, SIZES))
        rows -= taken[-1]
    assert taken == expected
    assert items_taken(24, 4, SIZES) == 32, "short passes are padded"
