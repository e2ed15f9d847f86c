"""The check of loops that save their carried values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    STATELESS,
    Attend,
    FixedChunk,
    GraphEdge,
    GraphNode,
    KVSpec,
    Loop,
    NodeSpec,
    Sampling,
    Sequential,
    StopWhen,
    Stream,
    StreamingGraphEdge,
)
from mstar_core.plugin import PROGRESS
from mstar_core.plugin.check.saving_check import saving_problems

LLM = NodeSpec(
    name="LLM",
    engine=KV_CACHE,
    ports={"x": "f32[n]", "v": "f32[n]", "id": "i64[1]"},
    kv=KVSpec(layers=1, kv_heads=1, head_dim=8),
    sampling=Sampling(port="id", vocab=8),
)
STEP = NodeSpec(name="step", engine=STATELESS, ports={"x": "f32[n]", "v": "f32[n]", "flag": "b8", "told": "i64[2]"})
LOOK = Attend(mask="full", write=False)
MOVED = GraphEdge("v", STEP)
TOLD = GraphEdge("told", CLIENT, modality=PROGRESS)
STREAM = Stream(name="s", into=(STEP, "v"), chunk=FixedChunk(1))


def steps(attend: Attend | None = LOOK, of_llm: Any = (), of_step: Any = (TOLD,), **fields: Any) -> Loop:
    denoise, move = GraphNode(LLM, ("x",), (MOVED, *of_llm), attend=attend), GraphNode(STEP, ("x", "v"), of_step)
    return Loop("denoise", **{"body": Sequential(denoise, move), "carry": {"x": "x"}, "save_every": 2, **fields})


def test_a_loop_whose_carried_values_are_all_it_depends_on_may_save() -> None:
    assert list(saving_problems("image", steps())) == []


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (steps(carry={}), "carries nothing"),
        (steps(stop=StopWhen("flag")), "stop rule"),
        (steps(over=STREAM), "stream"),
        (steps(attend=None), "writes the cache of 'LLM'"),
        (steps(attend=Attend(mask="full")), "writes the cache of 'LLM'"),
        (steps(of_llm=(GraphEdge("id", STEP, into="v"),)), "draws ids in 'LLM'"),
        (steps(of_step=(StreamingGraphEdge("x", STREAM),)), "puts 'x' on a stream"),
        (steps(of_step=(GraphEdge("x", CLIENT, modality="image"),)), "emits 'x' in each iteration"),
        (steps(body=GraphNode(STEP, ("x",))), "the engine runs as one job"),
        (Loop("outer", steps(), carry={"x": "x"}), "is inside another loop"),
    ],
)
def test_a_loop_that_cannot_begin_in_the_middle_must_not_save(loop: Loop, said: str) -> None:
    (problem,) = saving_problems("image", loop)
    assert said in str(problem) and "loop 'denoise'" in str(problem)
    others = replace(loop, save_every=0, body=replace(loop.body, save_every=0) if loop.name == "outer" else loop.body)
    assert list(saving_problems("image", others)) == []
