"""The sampler of captured steps draws what the plain sampler draws."""

from __future__ import annotations

import pytest
import torch

from mstar_core.engine.sampling.columns import UploadedColumns
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers.sampling import BAD_ROW
from tests.engine.exact_draw import is_right, probabilities, sample

pytestmark = pytest.mark.gpu


def drawn(
    device: torch.device,
    logits: torch.Tensor,
    params: list[SamplingParams],
    counter: torch.Tensor,
    ids: torch.Tensor | None = None,
) -> list[int]:
    """Return the ids that the kernels sample; every third id has been seen."""
    from mstar_core.engine.sampling import top_p

    uploaded = UploadedColumns.of(params, device)
    known = logits.shape[1] if ids is None else int(ids.max()) + 1
    seen = torch.zeros(len(params) + 2, known, dtype=torch.bool, device=device)
    seen[1:, ::3] = True
    slots = torch.arange(1, len(params) + 1, device=device)
    table = None if ids is None else ids.to(device, torch.int32)
    chance = torch.from_numpy(uploaded.chance(counter.numpy())).to(device)
    found: list[int] = top_p.draw(logits.to(device), uploaded.columns, chance, slots, seen, table).tolist()
    return found


@pytest.mark.parametrize("vocab", [53, 4096, 156940])
@pytest.mark.parametrize("spread", [1.0, 3.0, 8.0])
def test_ids_equal_the_sorting_sampler(cuda: torch.device, vocab: int, spread: float) -> None:
    params = [SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1, seed=seed) for seed in range(20)] + [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=9),
        SamplingParams(repetition_penalty=0.8),
    ]
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    counter = torch.arange(len(params))
    seen = torch.zeros(len(params), vocab, dtype=torch.bool)
    seen[:, ::3] = True
    expected = sample(logits, params, seen, counter).tolist()
    got = drawn(cuda, logits, params, counter)
    different = sum(a != b for a, b in zip(got, expected, strict=True))
    # A flat distribution over many ids puts thousands of edges within a rounding error of the drawn point.
    assert different <= (2 if vocab > 10_000 and spread < 2 else 0), (got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [53, 3072, 4097, 152064])
def test_top_k_and_min_p_equal_the_sorting_sampler(cuda: torch.device, vocab: int, dtype: torch.dtype) -> None:
    """bfloat16 logits have ties at the k-th place: those with the lowest ids stay."""
    rules = [
        (50, 1.0, 0.0),
        (50, 0.9, 0.0),
        (1, 1.0, 0.0),
        (0, 1.0, 0.1),
        (20, 0.95, 0.02),
        (7, 0.5, 0.3),
        (0, 0.8, 0.0),
    ]
    params = [
        SamplingParams(temperature=0.9, top_k=k, top_p=p, min_p=m, repetition_penalty=1.05, seed=seed)
        for seed, (k, p, m) in enumerate(rules * 3)
    ] + [SamplingParams(), SamplingParams(temperature=1.0, top_k=10**6, seed=9)]
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype) * 3
    counter = torch.arange(len(params))
    seen = torch.zeros(len(params), vocab, dtype=torch.bool)
    seen[:, ::3] = True
    expected = sample(logits.float(), params, seen, counter).tolist()
    assert drawn(cuda, logits, params, counter) == expected


def test_a_row_without_a_finite_maximum_draws_no_id(cuda: torch.device) -> None:
    logits = torch.randn(4, 300)
    logits[1] = float("-inf")
    logits[2, 5] = float("nan")
    params = [SamplingParams(temperature=1.0, seed=1)] * 4
    ids = drawn(cuda, logits, params, torch.zeros(4, dtype=torch.int64))
    assert ids[1] == ids[2] == BAD_ROW and ids[0] >= 0 and ids[3] >= 0


RULES = [
    SamplingParams(temperature=0.6, top_p=0.8, repetition_penalty=1.3, seed=1),
    SamplingParams(temperature=1.0, seed=2),
    SamplingParams(temperature=1.5, top_p=0.99, seed=3),
    SamplingParams(temperature=0.9, top_p=0.05, repetition_penalty=0.9, seed=4),
    SamplingParams(temperature=1e-4, top_p=0.5, seed=5),
    SamplingParams(),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 2, 3, 511, 1025, 28673, 156941])
def test_ids_are_those_of_the_definition(cuda: torch.device, vocab: int, dtype: torch.dtype) -> None:
    """Odd sizes, ties by the thousand (bfloat16), rows with one id only, rows with equal ids only."""
    params = [rule for rule in RULES for _ in range(4)]
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(vocab))
    logits *= torch.tensor([0.0, 1.1, 4.0, 1.0]).repeat(len(RULES))[:, None]
    logits[3::4, vocab // 2] = 200.0
    logits = logits.to(dtype)
    counter = torch.arange(len(params))
    got = drawn(cuda, logits, params, counter)
    chance = UploadedColumns.of(params, torch.device("cpu")).chance(counter.numpy()).tolist()
    seen = torch.zeros(vocab, dtype=torch.bool)
    seen[::3] = True
    wrong = [i for i, rule in enumerate(params) if not is_right(got[i], logits[i].float(), rule, seen, chance[i])]
    assert not wrong, [(i, got[i], params[i]) for i in wrong]


def test_a_row_does_not_depend_on_its_batch_nor_on_the_bucket(cuda: torch.device) -> None:
    params = [RULES[index % 5] for index in range(40)]
    logits = torch.randn(40, 20000, generator=torch.Generator().manual_seed(6)).bfloat16()
    counter = torch.arange(40)
    together = drawn(cuda, logits, params, counter)
    for index in range(40):
        alone = drawn(cuda, logits[index : index + 1], params[index : index + 1], counter[index : index + 1])
        assert alone == [together[index]]


def test_columns_of_some_ids_draw_what_all_others_at_minus_infinity_do(cuda: torch.device) -> None:
    ids = torch.cat([torch.tensor([3]), torch.arange(700, 5201)])
    params = [RULES[index % 6] for index in range(36)]
    logits = torch.randn(36, 9001, generator=torch.Generator().manual_seed(7)) * 2
    masked = torch.full_like(logits, float("-inf"))
    masked[:, ids] = logits[:, ids]
    counter = torch.arange(36)
    assert drawn(cuda, logits[:, ids], params, counter, ids) == drawn(cuda, masked, params, counter)


def test_draws_are_captured_and_follow_the_chance(cuda: torch.device) -> None:
    """A graph of one draw, replayed with other chances, gives the distribution."""
    from mstar_core.engine.sampling import top_p

    rows, vocab = 256, 3000
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(8)) * 3).to(cuda).expand(rows, -1).contiguous()
    params = [SamplingParams(temperature=1.0, top_p=0.9)]
    columns = UploadedColumns.of(params * rows, cuda).columns
    chance = torch.zeros(rows, dtype=torch.float64, device=cuda)
    slots = torch.zeros(rows, dtype=torch.int64, device=cuda)
    top_p.draw(logits, columns, chance, slots, None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = top_p.draw(logits, columns, chance, slots, None, None)
    found = torch.zeros(vocab)
    for seed in range(40):
        chance.copy_(torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        found += torch.bincount(given.cpu(), minlength=vocab)
    expected = probabilities(logits[:1].cpu(), params, None)[0]
    assert (found[expected == 0] == 0).all()
    assert (found / found.sum() - expected).abs().max() < 0.02
