"""Decode steps in fixed shapes give what the plain step gives. Nothing is captured on the CPU: tests/gpu does that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle, LoopSpec
from mstar_core.engine.cuda_graphs.cache import CaptureSizes, GraphCache
from mstar_core.engine.cuda_graphs.kinds import StepFamily
from mstar_core.graph.declare.nodes import Attend, EngineHints
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.recorded import RecordingCache, captured_tokens
from tests.engine.tiny_engine import LM, Driver, generate, make_engine, prompt
from tests.engine.tiny_world import numbers

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=5),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(repetition_penalty=0.9, seed=3),
    SamplingParams(temperature=1.2, top_p=0.6, seed=-4),
)
REQUESTS = [(prompt(seed, 3 + 5 * seed), 20 + seed, SAMPLINGS[seed % len(SAMPLINGS)]) for seed in range(7)]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("buckets", [(1, 8, 16), (16,)])
def test_fixed_shapes_change_no_id(buckets: tuple[int, ...], lookahead: int) -> None:
    engine = make_engine(graphs=buckets, lookahead=lookahead)
    expected = generate(REQUESTS, lookahead=lookahead)
    assert generate(REQUESTS, lookahead=lookahead, engine=engine) == expected
    counts = engine.graph_counts
    assert counts is not None and counts.hits > 20 and counts.misses == 0
    assert engine.memory().pages_used == 0


def test_top_k_and_min_p_are_captured_and_change_no_id() -> None:
    rules = [{"top_k": 3}, {"top_k": 50, "top_p": 0.7}, {"min_p": 0.1}, {"min_p": 0.05, "top_p": 0.8, "top_k": 9}, {}]
    rows = [
        (prompt(index, 4), 12, SamplingParams(temperature=1.1, seed=index, **each))  # type: ignore[arg-type]
        for index, each in enumerate(rules)
    ]
    engine = make_engine(graphs=CaptureSizes(decode=(4, 8), prefill=(64,)))
    assert generate(rows, engine=engine) == generate(rows)
    assert engine.counters()["graph_misses"] == engine.counters()["prefill_misses"] == 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_batch_beyond_the_largest_bucket_takes_several_replays(lookahead: int) -> None:
    engine = make_engine(graphs=(2,), lookahead=lookahead)
    assert generate(REQUESTS, lookahead=lookahead, engine=engine) == generate(REQUESTS, lookahead=lookahead)
    counts = engine.graph_counts
    assert counts is not None and counts.hits > 3 * counts.misses > 0, "each step is one miss and up to four replays"


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_captured_step_gives_the_ports_that_loops_emit(lookahead: int) -> None:
    """Loops that emit hidden states per token share a captured step with loops that emit nothing."""
    found: list[list[list[Tensor]]] = []
    for graphs in ((1, 4), ()):
        engine = make_engine(graphs=graphs, lookahead=lookahead)
        driver, keys = Driver(engine, lookahead), []
        for handle, emit in enumerate([("hidden", "velocity"), (), ("velocity",)]):
            driver.open(handle, SAMPLINGS[handle])
            driver.prefill(handle, prompt(handle, 4 + handle))
            loop = LoopSpec(max_iters=5 + handle, carry={"token": "token"}, stop_port="token", emit=emit)
            keys.append(driver.submit(handle, loop=loop, outputs=("token",)))
        driver.run()
        assert [item.iteration for item in driver.emissions[keys[2]]] == [*range(7)]
        assert keys[1] not in driver.emissions
        found.append(
            [[value for item in driver.emissions[key] for value in item.outputs.values()] for key in keys[::2]]
        )
        if graphs:
            assert engine.graph_counts is not None and engine.graph_counts.misses == 0
    for captured, plain in zip(*found, strict=True):
        assert len(captured) == len(plain) and captured[0].shape == (1, 32)
        torch.testing.assert_close(torch.cat(captured), torch.cat(plain), atol=1e-5, rtol=1e-5)


def test_a_node_that_samples_also_runs_captured_passes() -> None:
    """Decode, prefill and a flow over the same node, all captured."""
    spec = replace(LM, hints=EngineHints(capture_sizes=(1, 2, 4)))
    cache, sizes = RecordingCache(), CaptureSizes(decode=(1, 4), prefill=(16, 64))
    engine = make_engine(spec=spec, graphs=sizes, captures=cache)
    found = []
    for each in (engine, engine, make_engine()):
        driver = Driver(each)
        driver.open(0, SAMPLINGS[1])
        driver.prefill(0, prompt(1, 6))
        spoken = driver.decode(0, 6)
        loop = LoopSpec(max_iters=5, carry={"latents_out": "latents"}, fused=True)
        flow = driver.submit(
            0,
            inputs={"latents": numbers(0, 4, 32)},
            outputs=("latents_out",),
            sample=False,
            loop=loop,
            attend=Attend(mask="full", write=False),
        )
        driver.run()
        each.close(Handle(0))
        found.append((driver.ids[spoken], driver.done[flow].outputs["latents_out"]))
        while each.idle():
            pass
    assert found[0][0] == found[1][0] == found[2][0]
    torch.testing.assert_close(found[1][1], found[2][1], atol=1e-5, rtol=1e-5)
    assert engine.counters()["graph_misses"] == 5, "the first flow alone ran uncaptured"


def test_memory_pressure_changes_no_id() -> None:
    engine = make_engine(graphs=(16,), num_pages=26, prefix_cache=False)
    assert generate(REQUESTS, engine=engine) == generate(REQUESTS)
    assert engine.memory().preempted > 0 and engine.memory().pages_used == 0


def test_later_steps_run_once_before_serving_and_change_no_sequence() -> None:
    """Their kernels are compiled before serving, so a request during their capture waits for the capture alone."""
    buckets = CaptureSizes(decode=(1,), decode_later=(2, 8), prefill=(16,), prefill_later=(32, 64))
    captures = GraphCache(torch.device("cpu"))
    engine = make_engine(graphs=buckets, captures=captures)
    assert engine.counters()["graphs_captured"] == 2 and captured_tokens(engine, StepFamily.IDS) == [16]
    assert [planned.title for planned in captures.queue] == [
        *(f"prefill graph of {tokens} tokens" for tokens in (64, 32)),
        *(f"decode graph of {count} sequences" for count in (8, 2)),
    ]
    assert engine.memory().pages_used == 0 and engine.memory().slots_used == 0


def test_each_step_captured_before_serving_is_reported_and_none_later() -> None:
    told: list[tuple[str, str]] = []
    buckets = CaptureSizes(decode=(1, 4), decode_later=(2, 8))
    engine = make_engine(graphs=buckets, report=lambda phase, step: told.append((phase, step)))
    first = [("kernels", f"decode graph of {count} sequences") for count in (4, 1)]
    first.append(("kernels", "steps that are captured later"))
    assert told == first
    while engine.idle():
        pass
    assert told == first
