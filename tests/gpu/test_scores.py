"""Log-probabilities on CUDA: those of the CPU's distribution, beside plain requests, masks, known ids and lookahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.sampling.logit_subset import LogitSubset
from mstar_core.engine.sampling.scores import WIDTH, log_probabilities, scores
from mstar_core.graph.declare.sampling import MOST_LOGPROBS, SamplingParams
from tests.engine.constrained import EITHER, END, WORD, constrained_engine, held, obeys
from tests.engine.test_scores import GRAPHS, SAMPLINGS, STEPS, distribution, scored
from tests.engine.tiny_engine import LM, Driver, TinyLM, make_engine, prompt

pytestmark = pytest.mark.gpu

CLOSE = 1e-4
"""Products in float32 have other orders of summation than on the CPU."""

SIZES = [CaptureSizes(), GRAPHS]
NAMES = ["plain", "captured"]


def check(ids: list[int], numbers: np.ndarray, count: int) -> None:
    """Compare numbers with the log-softmax of the module on the CPU, also those of the alternatives."""
    assert numbers.shape == (len(ids), 1 + 2 * count)
    expected = distribution(ids)
    own = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert np.allclose(numbers[:, 0], own, atol=CLOSE)
    named = torch.from_numpy(numbers[:, 1::2].astype(np.int64))
    assert np.allclose(numbers[:, 2::2], expected.gather(1, named), atol=CLOSE)
    assert np.allclose(numbers[:, 2::2], expected.topk(count).values, atol=CLOSE), "they are the most likely ones"


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", SIZES, ids=NAMES)
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_numbers_are_those_of_the_cpu(cuda: torch.device, kind: str, graphs: CaptureSizes, lookahead: int) -> None:
    wanted, _ = scored(SAMPLINGS[kind])
    for company in (0, 3):
        ids, numbers = scored(
            SAMPLINGS[kind],
            company=company,
            device=cuda,
            module=TinyLM().to(cuda),
            graphs=graphs,
            lookahead=lookahead,
        )
        assert ids == wanted and len(ids) == STEPS + 1
        check(ids, numbers, 3)


@pytest.mark.parametrize("cut", [1, 7, STEPS + 1])
def test_known_ids_of_an_earlier_attempt_have_the_same_numbers(cuda: torch.device, cut: int) -> None:
    made = {"device": cuda, "module": TinyLM().to(cuda), "graphs": GRAPHS, "lookahead": 1}
    ids, numbers = scored(SAMPLINGS["shaped"], **made)
    again, repeated = scored(SAMPLINGS["shaped"], known=ids[:cut], **made)
    assert again == ids and np.allclose(repeated, numbers, atol=CLOSE)


def test_zero_alternatives_give_the_own_number_alone(cuda: torch.device) -> None:
    check(*scored(SamplingParams(logprobs=0), device=cuda, module=TinyLM().to(cuda)), 0)


@pytest.mark.parametrize("graphs", SIZES, ids=NAMES)
def test_a_mask_changes_no_number(cuda: torch.device, graphs: CaptureSizes) -> None:
    """A constrained request reports the model's own numbers, and so does a plain one beside it."""
    engine = constrained_engine(device=cuda, module=TinyLM().to(cuda), graphs=graphs, lookahead=1)
    driver = Driver(engine, 1)
    held_ids = prompt(1, 9)
    for handle, sampling in enumerate((held(EITHER, logprobs=2), held(WORD, 1, logprobs=0), SamplingParams(seed=2))):
        driver.open(handle, sampling)
    first = [driver.prefill(handle, held_ids) for handle in range(3)]
    loops = [driver.decode(handle, 6) for handle in range(3)]
    driver.run()
    assert not driver.failed, driver.failed
    ids = [int(driver.done[first[0]].outputs["token"]), *driver.ids[loops[0]]]
    numbers = [row for result in driver.results for key, row in result.scores.items() if key in (first[0], loops[0])]
    assert obeys(EITHER, ids[: ids.index(END) + 1] if END in ids else ids, is_whole=END in ids)
    model = Driver(make_engine())
    model.open(0)
    job = model.prefill(0, [*held_ids, *ids[:-1]], outputs=("logits",), sample=False)
    model.run()
    expected = torch.log_softmax(model.done[job].outputs["logits"][len(held_ids) - 1 :].float(), dim=-1)
    own = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert np.allclose([row[0] for row in numbers], own, atol=CLOSE)
    assert {len(row) for row in numbers} == {5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_of_a_large_vocabulary_are_those_of_the_cpu(cuda: torch.device, dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(8, 151_936, generator=torch.Generator().manual_seed(3))).to(dtype)
    ids = torch.randint(0, 151_936, (8,), generator=torch.Generator().manual_seed(4))
    host = scores(log_probabilities(logits), ids, LogitSubset(LM, 151_936, torch.device("cpu")))
    found = scores(log_probabilities(logits.to(cuda)), ids.to(cuda), LogitSubset(LM, 151_936, cuda)).cpu()
    assert found.shape == (8, WIDTH) and found.dtype == torch.float64
    assert torch.allclose(found[:, 0], host[:, 0], atol=CLOSE) and torch.allclose(
        found[:, 2::2], host[:, 2::2], atol=CLOSE
    )
    named = log_probabilities(logits).double().gather(1, found[:, 1::2].long())
    assert torch.allclose(found[:, 2::2], named, atol=CLOSE) and found[:, 1::2].shape[1] == MOST_LOGPROBS
