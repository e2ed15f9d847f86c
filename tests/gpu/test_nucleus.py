"""The sampler of captured steps draws what the plain sampler draws."""

from __future__ import annotations

import pytest
import torch

from mstar_core.engine import rng, sampler
from mstar_core.engine.base import SamplingParams

pytestmark = pytest.mark.gpu


def drawn(device: torch.device, logits: torch.Tensor, params: list[SamplingParams], counter: torch.Tensor) -> list[int]:
    from mstar_core.engine.nucleus import NucleusSampler

    rows = sampler.SamplingRows.of(params, device)
    seen = torch.zeros(len(params) + 2, logits.shape[1], dtype=torch.bool, device=device)
    seen[1:, ::3] = True
    slots = torch.arange(1, len(params) + 1, device=device)
    fixed = NucleusSampler(len(params), logits.shape[1], device)
    ids = fixed.draw(
        logits.to(device), seen=seen, slots=slots, penalty=rows.penalty[:, 0].contiguous(),
        temperature=rows.temperature[:, 0].contiguous(), top_p=rows.top_p[:, 0].contiguous(), greedy=rows.greedy,
        chance=rng.uniform_of(rows.state, counter.to(device)),
    )  # fmt: skip
    return ids.tolist()


@pytest.mark.parametrize("vocab", [53, 4096, 156940])
@pytest.mark.parametrize("spread", [1.0, 3.0, 8.0])
def test_ids_equal_the_sorting_sampler(cuda: torch.device, vocab: int, spread: float) -> None:
    params = [
        SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1, seed=seed) for seed in range(20)
    ] + [SamplingParams(), SamplingParams(temperature=1.0, seed=9), SamplingParams(repetition_penalty=0.8)]  # fmt: skip
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    counter = torch.arange(len(params))
    rows = sampler.SamplingRows.of(params, torch.device("cpu"))
    seen = torch.zeros(len(params), vocab, dtype=torch.bool)
    seen[:, ::3] = True
    expected = sampler.sample(logits.clone(), rows, seen, counter).tolist()
    got = drawn(cuda, logits, params, counter)
    different = sum(a != b for a, b in zip(got, expected, strict=True))
    # A flat distribution over many ids puts thousands of edges within a rounding error of the drawn point.
    assert different <= (2 if vocab > 10_000 and spread < 2 else 0), (got, expected)


def test_a_row_without_a_finite_maximum_draws_no_id(cuda: torch.device) -> None:
    logits = torch.randn(4, 300)
    logits[1] = float("-inf")
    logits[2, 5] = float("nan")
    params = [SamplingParams(temperature=1.0, seed=1)] * 4
    ids = drawn(cuda, logits, params, torch.zeros(4, dtype=torch.int64))
    assert ids[1] == ids[2] == sampler.BAD_ROW and ids[0] >= 0 and ids[3] >= 0
