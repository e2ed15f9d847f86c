"""Packed prefixes in fixed shapes give what the plain forward gives, whatever lengths share a replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle, LoopSpec
from mstar_core.engine.cuda_graphs.kinds import StepFamily
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.graph.declare.nodes import Attend, EngineHints
from tests.engine.recorded import RecordingCache, captured_tokens
from tests.engine.tiny_engine import LM, Driver, make_engine
from tests.engine.tiny_world import numbers

PREFIXED = replace(LM, sampling=None, hints=EngineHints(capture_sizes=(1, 2, 4), capture_tokens=(8, 16, 24, 32, 64)))
WHOLE = Attend(mask="full")
READ = Attend(mask="full", write=False)


def prefix_engine(captures: RecordingCache | None, **changes: Any) -> KVCacheEngine:
    graphs = () if captures is None else (1,)
    given = {"spec": PREFIXED, "vocab": 0, "graphs": graphs, "captures": captures, "token_budget": 64}
    return make_engine(**(given | changes))


def near(found: Tensor, expected: Tensor) -> None:
    """Sums over padded lengths are taken in another order."""
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def taught(captures: RecordingCache, **changes: Any) -> KVCacheEngine:
    """An engine whose graphs are there."""
    engine = prefix_engine(captures, **changes)
    act(engine, [7])
    while engine.idle():
        pass
    for graph in captures.graphs:
        graph.replays = 0
    return engine


def act(engine: KVCacheEngine, lengths: list[int], lookahead: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Requests with a prefix and a loop over it: what the prefix gave, and what the loop did."""
    driver, keys = Driver(engine, lookahead), []
    loop = LoopSpec(max_iters=3, carry={"latents_out": "latents"}, fused=True)
    for handle, length in enumerate(lengths):
        driver.open(handle, max_tokens=64)
        inputs = {"embeds": numbers(40 + handle, length, 32)}
        read = driver.submit(handle, inputs=inputs, attend=WHOLE, outputs=("hidden",), sample=False)
        flow = driver.submit(
            handle,
            inputs={"latents": numbers(handle, 4, 32)},
            outputs=("latents_out",),
            sample=False,
            loop=loop,
            attend=READ,
        )
        keys.append((read, flow))
    driver.run()
    assert not driver.failed, driver.failed
    for handle in range(len(lengths)):
        engine.close(Handle(handle))
    assert engine.memory().pages_used == 0
    done = driver.done
    return [(done[read].outputs["hidden"], done[flow].outputs["latents_out"]) for read, flow in keys]


def ran(captures: RecordingCache, engine: KVCacheEngine) -> list[int]:
    """Buckets of prefixes that were replayed, in tokens."""
    sizes = captured_tokens(engine, StepFamily.PREFIX)
    replays = [graph.replays for graph in reversed(captures.graphs[-len(sizes) :])]
    return [size for size, count in zip(sizes, replays, strict=True) for _ in range(count)]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(
    ("lengths", "buckets"),
    [([7], [8]), ([16], [16]), ([7, 13, 2], [24]), ([20, 20, 20], [64]), ([30, 30, 30], [32, 64])],
)
def test_prefixes_of_any_lengths_are_one_replay_and_equal_the_plain_ones(
    lengths: list[int], buckets: list[int], lookahead: int
) -> None:
    captures = RecordingCache()
    engine = taught(captures, lookahead=lookahead)
    misses = engine.counters()["graph_misses"]
    found, expected = act(engine, lengths, lookahead), act(prefix_engine(None), lengths)
    for pair, wanted in zip(found, expected, strict=True):
        for one, other in zip(pair, wanted, strict=True):
            near(one, other)
    assert ran(captures, engine) == buckets and engine.counters()["graph_misses"] == misses


def test_the_first_prefix_is_a_miss_and_teaches_all_buckets() -> None:
    captures = RecordingCache()
    engine = prefix_engine(captures)
    act(engine, [7])
    counted = engine.counters()
    assert (counted["graph_hits"], counted["graph_misses"]) == (0, 4), "a prefix and three steps of a loop"
    while engine.idle():
        pass
    assert captured_tokens(engine, StepFamily.PREFIX) == [8, 16, 24, 32, 64]


def test_buckets_that_a_step_cannot_fill_are_not_captured() -> None:
    engine = taught(RecordingCache(), token_budget=20)
    assert captured_tokens(engine, StepFamily.PREFIX) == [8, 16, 24]


@pytest.mark.parametrize("lengths", [[4], [5], [90]])
def test_what_no_bucket_suits_runs_plainly_and_is_counted(lengths: list[int]) -> None:
    """Five tokens in a bucket of eight would be padded by more than a third, and ninety are in none."""
    captures = RecordingCache()
    engine = taught(captures, token_budget=96)
    misses = engine.counters()["graph_misses"]
    near(act(engine, lengths)[0][1], act(prefix_engine(None, token_budget=96), lengths)[0][1])
    assert ran(captures, engine) == [] and engine.counters()["graph_misses"] == misses + 1


def test_a_pass_on_a_row_that_holds_something_runs_plainly() -> None:
    captures = RecordingCache()
    found = []
    for engine in (taught(captures), prefix_engine(None)):
        driver = Driver(engine)
        driver.open(0, max_tokens=64)
        for seed in (1, 2):
            key = driver.submit(
                0, inputs={"embeds": numbers(seed, 8, 32)}, attend=WHOLE, outputs=("hidden",), sample=False
            )
        driver.run()
        found.append(driver.done[key].outputs["hidden"])
    near(*found)
    assert sum(graph.replays for graph in captures.graphs) == 1


def test_what_a_replay_gave_stays_when_the_next_one_runs() -> None:
    engine = taught(RecordingCache())
    first = act(engine, [7])[0][0]
    kept = first.clone()
    act(engine, [8, 6])
    assert torch.equal(first, kept)
