"""Prompts in fixed shapes give what the plain forward gives. Nothing is captured on the CPU: tests/gpu does that."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from mstar_core.engine.base import Handle
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.cuda_graphs.kinds import StepFamily
from mstar_core.engine.cuda_graphs.passes import USUAL_PROMPTS
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.graph.declare.nodes import EngineHints
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.recorded import captured_tokens
from tests.engine.test_decode_graphs import REQUESTS
from tests.engine.tiny_engine import LM, WIDTH, Driver, generate, make_engine, prompt
from tests.engine.tiny_talker import OPENING, TALKER, Speech, Talk, make_talker

BUCKETS = CaptureSizes(decode=(1, 8, 16), prefill=(16, 64))


def made(**changes: object) -> KVCacheEngine:
    return make_engine(**({"graphs": BUCKETS} | changes))


def replayed(engine: KVCacheEngine) -> int:
    counters = engine.counters()
    assert counters["prefill_misses"] == 0 and counters["graph_misses"] == 0
    return int(counters["prefill_hits"])


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("budget", [7, 64])
def test_fixed_shapes_change_no_id(budget: int, lookahead: int) -> None:
    """A budget of 7 cuts the longer prompts into chunks, beside rows that decode."""
    engine = made(lookahead=lookahead, token_budget=budget, num_pages=256)
    expected = generate(REQUESTS, lookahead=lookahead)
    assert generate(REQUESTS, lookahead=lookahead, engine=engine) == expected
    assert replayed(engine) >= 2
    assert engine.counters()["prefill_tokens"] == sum(len(ids) for ids, _, _ in REQUESTS)


def test_prompts_that_begin_in_the_prefix_cache() -> None:
    head = prompt(9, 24)
    rows = [(head + prompt(seed, 1 + seed), 6, SamplingParams()) for seed in range(5)]
    engine = made()
    expected = [generate([row])[0] for row in rows]
    assert [generate([row], engine=engine)[0] for row in rows] == expected
    assert engine.counters()["prefill_tokens"] == 25 + 4 * 0 + sum(1 + seed for seed in range(1, 5))
    assert replayed(engine) == 5


def test_memory_pressure_changes_no_id() -> None:
    engine = made(num_pages=26, prefix_cache=False)
    assert generate(REQUESTS, engine=engine) == generate(REQUESTS)
    assert engine.memory().preempted > 0 and engine.memory().pages_used == 0
    assert replayed(engine) > 0


def test_more_prompts_than_a_bucket_has_rows_take_several_replays() -> None:
    """A bucket of 64 tokens takes eight prompts, so twenty short ones take three, one to a step."""
    rows = [(prompt(seed, 3), 2, SamplingParams()) for seed in range(20)]
    engine = made(max_slots=48)
    assert generate(rows, engine=engine) == generate(rows, max_slots=48)
    assert replayed(engine) == 3
    driver, hits = Driver(engine), [engine.counters()["prefill_hits"]]
    for handle in range(20):
        driver.open(handle)
        driver.prefill(handle, prompt(handle, 3))
    while driver.turn():
        hits.append(engine.counters()["prefill_hits"])
    assert max(after - before for before, after in itertools.pairwise(hits)) == 1


def test_a_close_in_the_middle_of_a_prompt_leaves_nothing() -> None:
    engine = made(token_budget=8)
    driver = Driver(engine)
    for handle in range(3):
        driver.open(handle, max_tokens=60)
        driver.prefill(handle, prompt(handle, 30))
    driver.turn()
    engine.close(Handle(0))
    driver.run()
    assert 1 not in driver.done and {2, 3} <= set(driver.done)
    for handle in (1, 2):
        engine.close(Handle(handle))
    assert (engine.memory().pages_used, engine.memory().slots_used) == (0, 0)


def test_what_a_graph_cannot_give_runs_plainly_and_is_counted() -> None:
    engine = made()
    driver = Driver(engine)
    driver.open(7)
    key = driver.prefill(7, prompt(3, 5), outputs=("token", "hidden"))
    driver.run()
    assert driver.done[key].outputs["hidden"].shape == (5, 32)
    assert engine.counters()["prefill_misses"] == 1 and engine.counters()["prefill_hits"] == 0


def test_a_burst_is_packed_into_few_steps_with_decode_between_them() -> None:
    """32 prompts of 45 tokens under a budget of 512: three forwards of prompts, and no step without the running row."""
    engine = make_engine(
        graphs=CaptureSizes(decode=(64,), prefill=(512,)),
        token_budget=512,
        num_pages=2000,
        max_slots=80,
        max_seq_len=256,
    )
    driver = Driver(engine)
    driver.open(100, max_tokens=200)
    driver.prefill(100, prompt(0, 4))
    running = driver.decode(100, 60)
    while running not in driver.ids:
        driver.turn()
    before, ids = engine.counters(), len(driver.ids[running])
    keys = []
    for handle in range(32):
        driver.open(handle, max_tokens=60)
        keys.append(driver.prefill(handle, prompt(handle, 45)))
    turns = 0
    while not set(keys) <= set(driver.done):
        driver.turn()
        turns += 1
    assert turns == 3 and engine.counters()["prefill_hits"] - before["prefill_hits"] == 3
    assert len(driver.ids[running]) - ids == turns


def test_the_larger_bucket_serves_until_the_smaller_is_captured_in_an_idle_moment() -> None:
    engine = made(graphs=CaptureSizes(decode=(8,), prefill=(64,), decode_later=(2,), prefill_later=(16,)))
    assert generate(REQUESTS[:2], engine=engine) == generate(REQUESTS[:2])
    first = engine.counters()["graphs_captured"]
    assert engine.idle() and not engine.idle() and not engine.idle()
    assert (first, engine.counters()["graphs_captured"]) == (2, 4)
    assert generate(REQUESTS[:2], engine=engine) == generate(REQUESTS[:2])
    assert replayed(engine) > 0


def test_no_bucket_is_larger_than_the_budget_asks_for() -> None:
    engine = made(graphs=CaptureSizes(decode=(1,), prefill=(16, 64), prefill_later=(32, 128, 256)), token_budget=48)
    while engine.idle():
        pass
    assert captured_tokens(engine, StepFamily.IDS) == [16, 32, 64]


def test_counters_are_empty_without_graphs() -> None:
    assert make_engine().counters() == {} and not make_engine().idle()


def test_what_single_requests_use_is_captured_before_the_others() -> None:
    spec = replace(LM, hints=EngineHints(capture_prompts=(64, *USUAL_PROMPTS, 256, 2048)))
    engine = make_engine(spec=spec, graphs=BUCKETS, token_budget=2048, num_pages=600, max_seq_len=256)
    engine.capture_usual()
    driver = Driver(engine)
    driver.open(1, max_tokens=200)
    driver.submit(1, inputs={"embeds": torch.randn(9, WIDTH)}, outputs=("token",))
    driver.run()
    graphs = engine._runner.graphs
    assert graphs is not None and not driver.failed

    def waiting() -> list[int]:
        return [each.size[0] for each in graphs.cache.queue if graphs.passes.is_prompt(each.buckets)]

    assert waiting() == sorted((64, *USUAL_PROMPTS, 256, 2048), reverse=True)
    engine.capture_usual()
    assert waiting() == [2048, 256, 64]
    captured = [
        size[0] for kind, sizes in graphs.passes.kinds.items() if kind.family is StepFamily.PROMPT for size in sizes
    ]
    assert captured == sorted(USUAL_PROMPTS)


def test_a_pass_of_a_fixed_length_is_captured_for_a_single_request_first() -> None:
    spec = replace(TALKER, hints=EngineHints(capture_prompts=(64,)))
    engine = make_talker(spec=spec, graphs=CaptureSizes(decode=(2,)))
    talk = Talk(Driver(engine), 0, Speech(first=3, text=(5, 2), steps=2))
    talk.open()
    talk.feed()
    talk.driver.run()
    graphs = engine._runner.graphs
    assert graphs is not None and not talk.driver.failed
    (kind,) = (kind for kind in graphs.passes.kinds if kind.family is StepFamily.PROMPT)
    assert kind.item_tokens == OPENING and graphs.passes.kinds[kind] == []
    engine.capture_usual()
    assert [size[:2] for size in graphs.passes.kinds[kind]] == [(OPENING, 1)]
