"""Requests come, fail, are closed and pressed for memory at any time; neighbours and counts stay right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_core.engine.base import Handle
from mstar_core.errors import ConfigError, EngineError, MstarError, NotFound, StartError, TooLarge
from mstar_core.graph.declare.nodes import Attend
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.tiny_engine import VOCAB, Driver, TinyLM, make_engine, prompt, reference
from tests.engine.tiny_world import numbers


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("turns", range(0, 14))
def test_close_at_any_point_frees_everything_and_leaves_others_alone(turns: int, lookahead: int) -> None:
    driver = Driver(make_engine(lookahead=lookahead, token_budget=6, num_pages=20), lookahead)
    loops = []
    for handle in range(3):
        driver.open(handle)
        driver.prefill(handle, prompt(handle, 10))
        loops.append(driver.decode(handle, 20))
    for _ in range(turns):
        driver.turn()
    driver.engine.close(Handle(1))
    driver.engine.close(Handle(1))
    driver.run()
    assert not driver.failed
    for handle in (0, 2):
        assert driver.ids[loops[handle]] == reference(prompt(handle, 10), 20)[1:]
        driver.engine.close(Handle(handle))
    memory = driver.engine.memory()
    assert (memory.pages_used, memory.slots_used) == (0, 0)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 24), st.integers(0, 20), st.integers(0, 30)), min_size=1, max_size=6),
    st.integers(12, 30),
    st.integers(1, 20),
    st.integers(0, 1),
)
def test_everything_that_fits_ends(work: list[tuple[int, int, int]], pages: int, budget: int, lookahead: int) -> None:
    engine = make_engine(num_pages=pages, token_budget=budget, lookahead=lookahead, max_slots=6)
    driver = Driver(engine, lookahead)
    closes: dict[int, int] = {}
    loops = {}
    for handle, (length, steps, cancel_at) in enumerate(work):
        driver.open(handle, max_tokens=48)
        driver.prefill(handle, prompt(handle, length), tokens_hash_seed=b"")
        loops[handle] = driver.decode(handle, steps)
        if cancel_at > 20:
            closes[handle] = cancel_at - 20
    for turn in range(1500):
        for handle, at in closes.items():
            if at == turn:
                engine.close(Handle(handle))
        # Three hold slots at once; the others enter when those end.
        for handle, loop in loops.items():
            if loop in driver.done:
                engine.close(Handle(handle))
        memory = engine.memory()
        assert memory.pages_used + memory.pages_cached <= memory.pages_total
        if not driver.turn() and turn > max(closes.values(), default=0):
            break
    assert not driver.failed
    ended = {handle for handle, loop in loops.items() if loop in driver.done}
    assert ended | set(closes) == set(loops)
    for handle in loops:
        engine.close(Handle(handle))
    assert (engine.memory().pages_used, engine.memory().slots_used) == (0, 0)


def test_a_failing_sequence_fails_alone() -> None:
    def fault(handles: list[Handle]) -> None:
        if 1 in handles and driver.ids.get(4, []) != []:
            raise RuntimeError("bad row")

    driver = Driver(make_engine(faults=fault))
    for handle in range(3):
        driver.open(handle)
        driver.prefill(handle, prompt(handle, 5))
        driver.decode(handle, 8)
    driver.run()
    assert list(driver.failed) == [4] and isinstance(driver.failed[4].error, EngineError)
    assert "bad row" in str(driver.failed[4].error)
    assert driver.ids[2] == reference(prompt(0, 5), 8)[1:] and driver.ids[6] == reference(prompt(2, 5), 8)[1:]
    assert driver.engine.memory().pages_used == 8, "the failed request holds no pages"


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_sequence_without_finite_logits_fails_alone_and_leaves_clean_pages(lookahead: int) -> None:
    module = TinyLM()
    module.embed.weight[50] = float("nan")
    driver = Driver(make_engine(module=module, num_pages=14, lookahead=lookahead, prefix_cache=False), lookahead)
    clean = [i % 50 for i in prompt(0, 9)]
    for handle, ids in enumerate([clean, [1, 50, 2], clean[:7]]):
        driver.open(handle)
        driver.prefill(handle, ids)
        driver.decode(handle, 6)
    driver.run()
    assert list(driver.failed) == [3] and "finite" in str(driver.failed[3].error)
    driver.engine.close(Handle(1))
    driver.open(9)
    first, loop = driver.prefill(9, clean[:7]), driver.decode(9, 6)
    driver.run()
    assert driver.ids[loop] == driver.ids[6] and int(driver.done[first].outputs["token"]) == int(
        driver.done[5].outputs["token"]
    )


@pytest.mark.parametrize("stops", [0, 4, 9])
def test_logits_that_turn_bad_end_a_loop_whatever_its_stop_ids(stops: int) -> None:
    module = TinyLM()
    driver = Driver(make_engine(module=module))
    driver.open(0)
    driver.prefill(0, [1, 2, 3])
    loop = driver.decode(0, 20, stop=tuple(range(100, 100 + stops)))
    for _ in range(4):
        driver.turn()
    module.sharpness = float("nan")
    driver.run()
    assert list(driver.failed) == [loop] and "finite" in str(driver.failed[loop].error)


def test_an_id_outside_the_vocabulary_fails_its_request_only() -> None:
    driver = Driver(make_engine())
    for handle, ids in enumerate([[1, 2], [VOCAB], [-1]]):
        driver.open(handle)
        driver.prefill(handle, ids)
    driver.run()
    assert sorted(driver.failed) == [2, 3] and list(driver.done) == [1]
    assert "vocabulary" in str(driver.failed[2].error)


def test_open_refuses_what_can_never_fit() -> None:
    engine = make_engine(num_pages=5)
    with pytest.raises(TooLarge) as caught:
        engine.open(Handle(1), SamplingParams(), 21)
    assert "21 tokens (6 pages)" in caught.value.detail and caught.value.facts["allowed"] == 20
    engine.open(Handle(1), SamplingParams(), 20)


def test_a_request_that_outgrows_the_pool_ends_with_the_numbers() -> None:
    driver = Driver(make_engine(num_pages=4))
    driver.open(0, max_tokens=16)
    driver.prefill(0, prompt(0, 10))
    driver.decode(0, 30)
    driver.run()
    assert isinstance(driver.failed[2].error, TooLarge) and "0 of 4 available" in driver.failed[2].error.detail
    assert len(driver.ids[2]) == 6


def test_the_context_limit_ends_a_loop_by_length() -> None:
    driver = Driver(make_engine(max_seq_len=16))
    driver.open(0, max_tokens=16)
    driver.prefill(0, prompt(0, 10))
    loop = driver.decode(0, 30)
    driver.run()
    assert (driver.done[loop].reason, driver.done[loop].iterations) == ("length", 6)


def test_an_input_over_the_context_limit_fails_with_the_numbers() -> None:
    driver = Driver(make_engine(max_seq_len=16))
    driver.open(0, max_tokens=16)
    driver.prefill(0, prompt(0, 17))
    driver.run()
    assert isinstance(driver.failed[1].error, TooLarge) and driver.failed[1].error.facts["allowed"] == 16


def test_requests_without_a_slot_wait_for_one() -> None:
    driver = Driver(make_engine(max_slots=2))
    for handle in range(2):
        driver.open(handle)
        driver.prefill(handle, [1, 2])
    driver.run()
    assert list(driver.done) == [1] and driver.engine.pressure().waiting == 1 and driver.engine.pressure().ready == 0
    driver.engine.close(Handle(0))
    assert driver.engine.pressure().ready == 1
    driver.run()
    assert sorted(driver.done) == [1, 2]


def test_pressure_counts_waiting_jobs_and_their_age() -> None:
    now = [10.0]
    driver = Driver(make_engine(clock=lambda: now[0]))
    assert driver.engine.pressure().ready == 0 and driver.engine.pressure().oldest_s == float("inf")
    driver.open(0)
    driver.prefill(0, [1])
    now[0] = 12.0
    assert (driver.engine.pressure().ready, driver.engine.pressure().oldest_s) == (1, 10.0)
    running = driver.engine.launch()
    assert running is not None and driver.engine.launch() is None
    driver.engine.collect(running)
    assert driver.engine.pressure().ready == 0


def test_jobs_of_a_closed_or_unknown_request_are_dropped() -> None:
    driver = Driver(make_engine())
    driver.prefill(5, [1])
    driver.engine.close(Handle(5))
    assert driver.engine.launch() is None


def test_an_unknown_branch_and_candidates_are_refused() -> None:
    driver = Driver(make_engine())
    driver.open(0)
    driver.open(1)
    driver.prefill(0, [1], branch="nowhere")
    driver.prefill(1, [1], rows=2)
    driver.run()
    assert "nowhere" in str(driver.failed[1].error) and "2 candidates" in str(driver.failed[2].error)


def test_missing_backends_are_named() -> None:
    with pytest.raises(NotFound, match="flashinfr"):
        make_engine(attention="flashinfr")
    with pytest.raises(StartError, match="FlashInfer needs a GPU") as caught:
        make_engine(attention="flashinfer")
    assert "cpu" in caught.value.detail and "torch" in caught.value.hint


def test_too_few_slots_for_the_branches_are_refused_at_start() -> None:
    with pytest.raises(ConfigError):
        make_engine(max_slots=1)


def test_every_error_is_a_mstar_error() -> None:
    driver = Driver(make_engine())
    driver.open(0)
    driver.submit(0, inputs={"tokens": torch.tensor([], dtype=torch.int64)})
    driver.run()
    assert isinstance(driver.failed[1].error, MstarError)


def test_a_preempted_prefix_is_recomputed_from_copies_of_its_values() -> None:
    """Small inputs stay on the host, where the caller may overwrite them once the job has ended."""
    found = []
    for is_overwritten in (False, True):
        engine = make_engine()
        driver = Driver(engine)
        driver.open(0)
        embeds = numbers(3, 6, 32)
        driver.submit(0, inputs={"embeds": embeds}, outputs=(), attend=Attend(mask="full"), sample=False)
        driver.run()
        if is_overwritten:
            embeds.zero_()
        engine._scheduler._pages.evict(engine._scheduler._requests.requests[Handle(0)].branches["main"])
        key = driver.prefill(0, prompt(1, 4), sample=False, outputs=("hidden",))
        driver.run()
        found.append(driver.done[key].outputs["hidden"])
    assert torch.equal(*found)
