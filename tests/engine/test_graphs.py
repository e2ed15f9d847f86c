"""Decode steps in fixed shapes give what the plain step gives. Nothing is captured on the CPU: tests/gpu does that."""

from __future__ import annotations

import pytest

from mstar_core.engine.base import SamplingParams
from mstar_core.engine.cuda_graphs.buckets import Buckets
from tests.engine.tiny_engine import generate, make_engine, prompt

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


def test_rules_without_a_fixed_shape_run_eagerly_and_are_counted() -> None:
    rows = [(prompt(1, 4), 8, SamplingParams(temperature=1.0, top_k=3, seed=2)), (prompt(2, 4), 8, SamplingParams())]
    engine = make_engine(graphs=(4,))
    assert generate(rows, engine=engine) == generate(rows)
    counts = engine.graph_counts
    assert counts is not None and counts.misses > 0


def test_memory_pressure_changes_no_id() -> None:
    engine = make_engine(graphs=(16,), num_pages=26, prefix_cache=False)
    assert generate(REQUESTS, engine=engine) == generate(REQUESTS)
    assert engine.memory().preempted > 0 and engine.memory().pages_used == 0


def test_later_steps_run_once_before_serving_and_harm_no_row() -> None:
    """What their kernels need is compiled then; a request that meets their capture waits for the capture alone."""
    buckets = Buckets(decode=(1,), decode_later=(2, 8), prefill=(16,), prefill_later=(32, 64))
    engine = make_engine(graphs=buckets)
    ran = engine._graphs.decode, engine._graphs.prompts  # type: ignore[union-attr]
    assert [part.sizes for part in ran] == [[1], [16]]
    assert [part._later for part in ran] == [[2, 8], [32, 64]]
    assert engine.memory().pages_used == 0 and engine.memory().slots_used == 0


def test_each_step_captured_before_serving_is_reported_and_none_later() -> None:
    told: list[tuple[str, str]] = []
    buckets = Buckets(decode=(1, 4), decode_later=(2, 8))
    engine = make_engine(graphs=buckets, report=lambda phase, step: told.append((phase, step)))
    first = [("kernels", f"decode graph of {rows} rows") for rows in (1, 4)]
    first.append(("kernels", "steps that are captured later"))
    assert told == first
    while engine.idle():
        pass
    assert told == first
