"""Masks of constrained sequences on CUDA: the kernel, uncaptured steps and captured ones equal those of the CPU."""

from __future__ import annotations

import pytest
import torch

from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.sampling.logit_subset import LogitSubset
from mstar_core.engine.sampling.masks import masked, masked_plainly
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.constrained import GRAMMARS, answers, constrained_engine, held, obeys
from tests.engine.test_masks import packed
from tests.engine.test_sampler_adjustments import captured
from tests.engine.tiny_engine import LM, VOCAB, TinyLM, make_engine, prompt

pytestmark = pytest.mark.gpu

STEPS = 30
HELD = [(prompt(seed, 4), STEPS, held(constraint, seed)) for seed, constraint in enumerate(GRAMMARS * 2)]
ADJUSTED = (prompt(7, 5), STEPS, held(GRAMMARS[1], 7, frequency_penalty=0.8, logit_bias={2: 2.0}))
PLAIN = [(prompt(seed, 3 + seed), STEPS, SamplingParams(temperature=0.9, top_p=0.9, seed=seed)) for seed in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "vocab"), [(1, 53), (8, 4096), (5, 151_936), (64, 32_001)])
def test_the_kernel_changes_forbidden_ids_alone(cuda: torch.device, count: int, vocab: int, dtype: torch.dtype) -> None:

    subset = LogitSubset(LM, vocab, cuda)
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(count, vocab, generator=generator).to(dtype)
    logits[:, 1] = -0.0
    constrained = -(-count // 2)
    allowed = torch.rand(constrained, vocab, generator=generator) < 0.3
    rows = torch.full((count,), -1, dtype=torch.int32)
    rows[torch.randperm(count, generator=generator)[:constrained]] = torch.arange(constrained, dtype=torch.int32)
    masks = packed(allowed)
    expected = masked_plainly(logits.clone(), masks, rows, LogitSubset(LM, vocab, torch.device("cpu")))
    found = masked(logits.to(cuda), masks.to(cuda), rows.to(cuda), subset)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(found.cpu().view(bits), expected.view(bits))
    plain = masked_plainly(logits.to(cuda), masks.to(cuda), rows.to(cuda), subset)
    assert torch.equal(plain.cpu().view(bits), expected.view(bits))


def test_a_mask_of_all_ids_and_a_mask_of_one(cuda: torch.device) -> None:

    allowed = torch.zeros(2, VOCAB, dtype=torch.bool)
    allowed[0], allowed[1, VOCAB - 1] = True, True
    logits = torch.randn(2, VOCAB, device=cuda)
    rows = torch.tensor([0, 1], dtype=torch.int32, device=cuda)
    found = masked(logits.clone(), packed(allowed).to(cuda), rows, LogitSubset(LM, VOCAB, cuda))
    assert torch.equal(found[0], logits[0])
    assert found[1].isfinite().nonzero().flatten().tolist() == [VOCAB - 1]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", [CaptureSizes(), CaptureSizes(decode=(1, 8, 16), prefill=(16, 64))])
def test_answers_obey_their_grammars_and_equal_those_of_the_cpu(
    cuda: torch.device, graphs: CaptureSizes, lookahead: int
) -> None:
    requests = [*HELD, ADJUSTED]
    wanted = answers(requests, constrained_engine())
    engine = constrained_engine(device=cuda, module=TinyLM().to(cuda), graphs=graphs, lookahead=lookahead)
    for _ in range(3):  # the variants are captured after the first round
        found = answers(requests, engine, lookahead)
        assert found == wanted
        captured(engine)
    for (_, _, sampling), (ids, reason) in zip(requests, found, strict=True):
        assert obeys(sampling.constraint or "", ids, is_whole=reason == "stop")


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", [CaptureSizes(), CaptureSizes(decode=(1, 8, 16), prefill=(16, 64))])
def test_plain_sequences_beside_constrained_ones_keep_their_ids(
    cuda: torch.device, graphs: CaptureSizes, lookahead: int
) -> None:
    wanted = answers(
        PLAIN, make_engine(device=cuda, module=TinyLM().to(cuda), graphs=graphs, lookahead=lookahead), lookahead
    )
    mixed = [request for pair in zip(PLAIN, HELD, strict=False) for request in pair]
    engine = constrained_engine(device=cuda, module=TinyLM().to(cuda), graphs=graphs, lookahead=lookahead)
    for _ in range(3):
        assert answers(mixed, engine, lookahead)[::2] == wanted
        captured(engine)
    if graphs.decode:
        misses = engine.counters()["graph_misses"]
        answers(mixed, engine, lookahead)
        assert engine.counters()["graph_misses"] == misses, "every step has a variant by now"
