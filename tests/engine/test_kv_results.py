"""Results do not depend on how the engine computed them: chunks, batches, caches, preemption, overlap."""

from __future__ import annotations

import pytest
import torch

from mstar_core.engine.base import Handle
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.tiny_engine import LM, VOCAB, Driver, TinyLM, generate, make_engine, prompt, reference

GREEDY = SamplingParams()
WARM = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=5)


def dense_ids(ids: list[int], steps: int) -> list[int]:
    """Greedy ids by recomputing the whole sequence for each id, without pages: plain causal attention."""

    class Dense:
        def attend(self, layer, query, key, value, scale=None):  # type: ignore[no-untyped-def]
            heads = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
            scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)

    module, out = TinyLM(), list(ids)
    for _ in range(steps):
        hidden = module(kv=Dense(), positions=torch.arange(len(out)), tokens=torch.tensor(out))["hidden"]
        out.append(int(module.head(hidden[-1:]).argmax()))
    return out[len(ids) :]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 13])
def test_paged_equals_dense_attention(length: int) -> None:
    ids = prompt(length, length)
    assert reference(ids, 14) == dense_ids(ids, 15)


@pytest.mark.parametrize("budget", [1, 3, 4, 7])
def test_chunked_prefill_equals_whole(budget: int) -> None:
    ids = prompt(1, 30)
    assert generate([(ids, 10, GREEDY)], token_budget=budget, page_size=2)[0] == reference(ids, 10)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_mixed_batch_equals_alone(lookahead: int, sampling: SamplingParams) -> None:
    work = [
        (prompt(i, length), steps, sampling) for i, (length, steps) in enumerate([(3, 20), (17, 5), (9, 31), (40, 12)])
    ]
    together = generate(work, lookahead=lookahead, token_budget=11)
    assert together == [reference(ids, steps, sampling) for ids, steps, _ in work]


def test_greedy_and_sampled_sequences_share_a_batch() -> None:
    work = [
        (prompt(i, 6 + i), 12, sampling)
        for i, sampling in enumerate([GREEDY, WARM, GREEDY, SamplingParams(temperature=1.0, seed=3)])
    ]
    assert generate(work) == [reference(*each) for each in work]


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_seed_gives_the_same_ids_in_any_batch(position: int) -> None:
    others = [(prompt(50 + i, 4 + 3 * i), 9 + i, SamplingParams(temperature=1.0, seed=i)) for i in range(3)]
    work = [*others[:position], (prompt(3, 8), 16, WARM), *others[position:]]
    assert generate(work)[position] == reference(prompt(3, 8), 16, WARM)


def test_different_seeds_give_different_ids() -> None:
    first, second = (reference(prompt(3, 8), 16, SamplingParams(temperature=1.5, seed=seed)) for seed in (1, 2))
    assert first != second


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize("pages", [13, 16, 22])
def test_preempted_equals_uninterrupted(pages: int, sampling: SamplingParams, lookahead: int) -> None:
    work = [(prompt(i, 9 + i), 30, sampling) for i in range(4)]
    assert generate(work, num_pages=pages, lookahead=lookahead, token_budget=16) == [reference(*each) for each in work]


def test_memory_pressure_preempts() -> None:
    driver = Driver(make_engine(num_pages=13))
    for handle in range(3):
        driver.open(handle)
        driver.prefill(handle, prompt(handle, 8))
        driver.decode(handle, 30)
    driver.run()
    memory = driver.engine.memory()
    assert len(driver.done) == 6 and memory.preempted > 0
    assert memory.preempted_pages >= memory.preempted and memory.last_preempted in (1, 2)  # never the oldest


def test_prefix_hit_equals_fresh() -> None:
    driver = Driver(make_engine())
    shared = prompt(1, 21)
    tails = [[], [5], prompt(2, 6)]
    got, cached = [], []
    for handle, tail in enumerate(tails):
        driver.open(handle)
        first = driver.prefill(handle, shared + tail, tokens_hash_seed=b"text")
        loop = driver.decode(handle, 9)
        driver.run()
        got.append([int(driver.done[first].outputs["token"]), *driver.ids[loop]])
        cached.append(driver.done[first].cached_tokens)
        driver.engine.close(Handle(handle))
    assert got == [reference(shared + tail, 9) for tail in tails]
    assert cached == [0, 20, 20]
    assert driver.engine.memory().pages_cached > 0


def test_prefix_cache_keeps_a_token_to_compute_and_keys_the_seed() -> None:
    driver = Driver(make_engine())
    for handle, seed in enumerate([b"a", b"a", b"b", None]):
        driver.open(handle)
        driver.prefill(handle, prompt(1, 8), tokens_hash_seed=seed)
        driver.run()
    assert [driver.done[key].cached_tokens for key in (1, 2, 3, 4)] == [0, 4, 0, 0]


def test_cached_prompt_ids_still_count_for_the_penalty() -> None:
    driver = Driver(make_engine())
    sampling = SamplingParams(repetition_penalty=3.0)
    got = []
    for handle in (0, 1):
        driver.open(handle, sampling)
        first, loop = driver.prefill(handle, prompt(4, 17), tokens_hash_seed=b""), driver.decode(handle, 12)
        driver.run()
        got.append([int(driver.done[first].outputs["token"]), *driver.ids[loop]])
    assert got[0] == got[1] == reference(prompt(4, 17), 12, sampling)


@pytest.mark.parametrize("length", [7, 8, 9])
def test_fork_equals_plain(length: int) -> None:
    driver = Driver(make_engine())
    ids, more, other = prompt(1, length), prompt(2, 5), prompt(3, 3)
    driver.open(0)
    driver.prefill(0, ids, sample=False)
    driver.run()
    driver.engine.fork(Handle(0), "main", "side")
    main = driver.prefill(0, more), driver.decode(0, 9)
    side = driver.prefill(0, other, branch="side"), driver.decode(0, 9, branch="side")
    driver.run()
    for (first, loop), tail in ((main, more), (side, other)):
        assert [int(driver.done[first].outputs["token"]), *driver.ids[loop]] == reference(ids + tail, 9)
    driver.engine.close(Handle(0))
    assert driver.engine.memory().pages_used == 0


def test_fork_shares_pages_until_written() -> None:
    driver = Driver(make_engine())
    driver.open(0)
    driver.prefill(0, prompt(1, 10), sample=False)
    driver.run()
    driver.engine.fork(Handle(0), "main", "side")
    assert driver.engine.memory().pages_used == 3
    driver.prefill(0, [1], branch="side", sample=False)
    driver.run()
    assert driver.engine.memory().pages_used == 4


def test_logits_of_every_token_can_be_requested() -> None:
    ids = prompt(6, 11)
    whole, chunked = Driver(make_engine()), Driver(make_engine(token_budget=4))
    for driver in (whole, chunked):
        driver.open(0)
        driver.prefill(0, ids, outputs=("logits", "hidden"), sample=False)
        driver.run()
    first, second = whole.done[1].outputs, chunked.done[1].outputs
    assert first["logits"].shape == (11, VOCAB) and first["logits"].dtype == torch.float32
    assert torch.allclose(first["logits"], second["logits"], atol=1e-4)
    assert torch.allclose(first["hidden"], second["hidden"], atol=1e-5)


def test_suppressed_ids_are_never_drawn() -> None:
    from dataclasses import replace

    from mstar_core.graph.declare.nodes import Sampling

    spec = replace(LM, sampling=Sampling(port="token", suppress=(range(0, 40),)))
    sampling = SamplingParams(temperature=2.0, seed=1)
    ids = generate([(prompt(1, 5), 40, sampling)], spec=spec)[0]
    assert min(ids) >= 40
