"""Sampling: its distribution, its order of operations, its independence of the batch, and its random numbers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mstar_core.engine.device_state.slots import DeviceSlots
from mstar_core.engine.sampling.columns import UploadedColumns
from mstar_core.engine.sampling.sampler import Sampler
from mstar_core.graph import Sampling
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers import rng
from mstar_core.layers.sampling import BAD_ROW, HEAD
from tests.engine.exact_draw import is_right, probabilities, sample
from tests.engine.tiny_engine import LM

ROOT = Path(
    os.environ.get("MSTAR_GOLDEN") or Path(__file__).parents[2] / "plugins" / "mstar-orpheus" / "tests" / "golden"
)
GOLDEN = ROOT / "orpheus" if (ROOT / "orpheus").is_dir() else ROOT


def plain_probabilities(logits: Tensor, params: SamplingParams, seen: Tensor) -> Tensor:
    """The chain of steps one after the other, on one row, as a textbook has them."""
    logits = logits.double().clone()
    hit = logits[seen]
    logits[seen] = torch.where(hit > 0, hit / params.repetition_penalty, hit * params.repetition_penalty)
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    logits /= params.temperature
    if params.top_k:
        logits[logits < logits.topk(min(params.top_k, len(logits))).values[-1]] = float("-inf")
    share = logits.softmax(0)
    order = share.argsort(descending=True, stable=True)
    before = share[order].cumsum(0) - share[order]
    share[order[before >= params.top_p]] = 0 if params.top_p < 1 else share[order[before >= params.top_p]]
    share[share < params.min_p * share.max()] = 0
    return share / share.sum()


CASES = [
    SamplingParams(temperature=0.6, top_p=0.8, repetition_penalty=1.3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.4, top_k=5),
    SamplingParams(temperature=0.9, top_k=700, top_p=0.95),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.8, top_p=0.7, top_k=20, min_p=0.05, repetition_penalty=1.1),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(temperature=1.0, repetition_penalty=0.7),
]


@pytest.mark.parametrize("vocab", [40, 2000])
@pytest.mark.parametrize("params", CASES)
def test_probabilities_equal_the_plain_chain(params: SamplingParams, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(vocab, generator=generator) * 3
    seen = torch.rand(vocab, generator=generator) < 0.2
    found = probabilities(logits[None], [params], seen[None])[0]
    assert torch.allclose(found, plain_probabilities(logits, params, seen), atol=1e-6)


@pytest.mark.parametrize("params", CASES[:6])
def test_draws_follow_the_probabilities(params: SamplingParams) -> None:
    """Also for a vocabulary where only the largest logits are sorted at first."""
    vocab, draws = HEAD + 300, 4000
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, vocab, generator=generator) * 2
    seen = torch.zeros(1, vocab, dtype=torch.bool)
    expected = probabilities(logits, [params], seen)[0]
    many = sample(logits.expand(draws, -1), [params] * draws, seen.expand(draws, -1), torch.arange(draws))
    found = torch.bincount(many, minlength=vocab) / draws
    assert (found[expected == 0] == 0).all()
    assert (found - expected).abs().max() < 0.03 and (found - expected).abs().sum() < 0.5


def test_sorting_the_largest_gives_what_sorting_all_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(64, 1500, generator=torch.Generator().manual_seed(2)) * 2
    batch = [CASES[i % 6] for i in range(64)]
    seen, counter = torch.zeros(64, 1500, dtype=torch.bool), torch.arange(64)
    few = sample(logits, batch, seen, counter)
    monkeypatch.setattr("mstar_core.layers.sampling.HEAD", 1500)
    assert torch.equal(few, sample(logits, batch, seen, counter))


def test_rows_of_logits_may_lie_apart() -> None:
    """A padded head leaves columns between its rows, which no draw reads or writes."""
    slots = DeviceSlots(len(CASES) + 1, 71, torch.device("cpu"))
    sampler = Sampler(replace(LM, sampling=Sampling(port="token", suppress=(range(3, 9),))), slots)
    drawn, padded = UploadedColumns.of(CASES, torch.device("cpu")), torch.randn(len(CASES), 128)
    chance, at = torch.rand(len(CASES), dtype=torch.float64), torch.arange(len(CASES))
    ids = [sampler.draw(logits, drawn.columns, chance, at) for logits in (padded[:, :71].contiguous(), padded[:, :71])]
    assert torch.equal(ids[0], ids[1]) and torch.isinf(padded).sum() == 6 * len(CASES)


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(6, 900, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(temperature=1.0 if i % 2 else 0.0, seed=i, top_p=0.9) for i in range(6)]
    counter = torch.arange(10, 16)
    together = sample(logits, params, None, counter)
    for index in range(6):
        alone = sample(logits[index : index + 1], [params[index]], None, counter[index : index + 1])
        assert alone.item() == together[index].item()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_a_row_without_a_finite_maximum_is_marked(value: float, temperature: float) -> None:
    logits = torch.randn(2, 700)
    logits[1] = value
    params = SamplingParams(temperature=temperature)
    found = sample(logits, [params, params], None, torch.zeros(2, dtype=torch.int64))
    assert found[1] == BAD_ROW and found[0] >= 0


@pytest.mark.golden
def test_probabilities_equal_the_golden_vectors() -> None:
    from safetensors.torch import load_file

    golden = load_file(GOLDEN / "llm_expected.safetensors")
    params = SamplingParams(**json.loads((GOLDEN / "config.json").read_text())["sampling"])
    names = [name for name in golden if name.startswith("sampling_logits_")]
    assert names
    for name in names:
        logits, index = golden[name][None], name.removeprefix("sampling_logits_")
        seen = torch.zeros(logits.shape, dtype=torch.bool)
        seen[0, golden[f"sampling_history_{index}"]] = True
        found = probabilities(logits, [params], seen)[0]
        assert (found - golden[f"sampling_probs_{index}"]).abs().max() < 1e-5


def test_uniform_numbers_are_a_fixed_function_of_seed_and_counter() -> None:
    """Known answers, so that no change of torch or of this code moves a seeded result unnoticed."""
    found = rng.uniform(torch.tensor([0, 1, -5]), torch.tensor([0, 7, 1 << 40]))

    def by_hand(seed: int, counter: int) -> float:
        full = (1 << 64) - 1

        def mix(x: int) -> int:
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & full
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & full
            return x ^ (x >> 31)

        state = mix(((seed & full) * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & full)
        return (mix((state + (counter + 1) * 0x9E3779B97F4A7C15) & full) >> 11) / (1 << 53)

    assert found.tolist() == [by_hand(0, 0), by_hand(1, 7), by_hand(-5, 1 << 40)]


def test_uniform_numbers_are_even_and_normals_normal() -> None:
    uniform = rng.uniform(torch.full((20000,), 9), torch.arange(20000))
    assert 0 <= uniform.min() and uniform.max() < 1
    counts = torch.histc(uniform.float(), 10, 0, 1)
    assert (counts - 2000).abs().max() < 200
    normal = rng.normal(torch.tensor([1, 2]), torch.tensor([0, 0]), 20001)
    assert normal.shape == (2, 20001) and normal.dtype == torch.float32
    assert normal.mean().abs() < 0.03 and (normal.std() - 1).abs() < 0.03
    assert torch.corrcoef(normal)[0, 1].abs() < 0.03


def test_noise_of_a_row_does_not_depend_on_the_batch() -> None:
    both = rng.normal(torch.tensor([4, 5]), torch.tensor([1, 2]), 33)
    assert torch.equal(both[1:], rng.normal(torch.tensor([5]), torch.tensor([2]), 33))


@pytest.mark.parametrize("top_p", [0.3, 1.0])
def test_equal_logits_are_drawn_in_the_order_of_their_ids(top_p: float) -> None:
    """As bfloat16 gives them by the hundred; the definition is computed apart, in float64."""
    draws, vocab = 300, HEAD + 700
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(4)).bfloat16().float().expand(draws, -1)
    params = SamplingParams(temperature=0.8, top_p=top_p, seed=12)
    counter = torch.arange(draws)
    found = sample(logits, [params] * draws, None, counter).tolist()
    chance = rng.uniform(torch.full((draws,), 12), counter).tolist()
    seen = torch.zeros(vocab, dtype=torch.bool)
    assert all(is_right(found[index], logits[0], params, seen, chance[index]) for index in range(draws))
