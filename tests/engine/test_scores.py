"""Log-probabilities are those of the model itself, whatever shapes the draw, and change no drawn id."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.graph.declare.nodes import Sampling
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.tiny_engine import LM, VOCAB, Driver, TinyLM, generate, make_engine, prompt

IDS = prompt(3, 11)
STEPS = 12
SHAPED = SamplingParams(
    temperature=0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.7, logit_bias={5: 3.0, 9: -40.0}, seed=5
)
SAMPLINGS = {
    "greedy": SamplingParams(logprobs=3),
    "shaped": replace(SHAPED, logprobs=3),
}
GRAPHS = CaptureSizes(decode=(1, 8), prefill=(16, 64))


def scored(
    sampling: SamplingParams, known: list[int] | None = None, company: int = 0, **changes: object
) -> tuple[list[int], np.ndarray]:
    """Return the ids of one request and their numbers. known: from an earlier attempt. company: plain requests."""
    lookahead = int(changes.get("lookahead", 0))  # type: ignore[call-overload]
    driver = Driver(make_engine(**changes), lookahead)
    known = known or []
    for handle in range(company + 1):
        driver.open(handle, sampling if handle == 0 else SamplingParams(temperature=0.9, seed=handle))
    firsts = [
        driver.prefill(handle, IDS, known=known[0] if known and not handle else None) for handle in range(company + 1)
    ]
    loops = [driver.decode(handle, STEPS, (), tuple(known[1:]) if not handle else ()) for handle in range(company + 1)]
    driver.run()
    assert not driver.failed, driver.failed
    keys = {firsts[0], loops[0]}
    numbers = [row for result in driver.results for key, row in result.scores.items() if key in keys]
    assert all(key in keys for result in driver.results for key in result.scores), "plain requests report none"
    return [int(driver.done[firsts[0]].outputs["token"]), *driver.ids[loops[0]]], np.array(numbers)


def distribution(ids: list[int]) -> torch.Tensor:
    """Return log-softmax of the module's logits for each id after the prompt: float32 [n, vocabulary]."""
    driver = Driver(make_engine())
    driver.open(0)
    job = driver.prefill(0, [*IDS, *ids[:-1]], outputs=("logits",), sample=False)
    driver.run()
    return torch.log_softmax(driver.done[job].outputs["logits"][len(IDS) - 1 :].float(), dim=-1)


def check(ids: list[int], numbers: np.ndarray, count: int = 3) -> None:
    assert numbers.shape == (len(ids), 1 + 2 * count)
    expected = distribution(ids)
    own = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert np.allclose(numbers[:, 0], own, atol=1e-5)
    top = expected.topk(count)
    assert (numbers[:, 1::2] == top.indices.numpy()).all()
    assert np.allclose(numbers[:, 2::2], top.values, atol=1e-5)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", [CaptureSizes(), GRAPHS], ids=["plain", "fixed shapes"])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_numbers_are_the_log_softmax_of_the_raw_logits(kind: str, graphs: CaptureSizes, lookahead: int) -> None:
    ids, numbers = scored(SAMPLINGS[kind], graphs=graphs, lookahead=lookahead)
    assert len(ids) == STEPS + 1
    check(ids, numbers)


def test_requests_beside_plain_ones_report_theirs_alone() -> None:
    check(*scored(SAMPLINGS["shaped"], company=3))


def test_a_request_draws_the_same_ids_with_and_without() -> None:
    ids, _ = scored(SAMPLINGS["shaped"])
    (plain,) = generate([(IDS, STEPS, SHAPED)])
    assert ids == plain


def test_zero_alternatives_give_the_own_number_alone() -> None:
    check(*scored(SamplingParams(logprobs=0)), count=0)


@pytest.mark.parametrize("cut", [1, 2, 7, STEPS + 1])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_known_ids_of_an_earlier_attempt_have_the_same_numbers(kind: str, cut: int) -> None:
    ids, numbers = scored(SAMPLINGS[kind])
    again, repeated = scored(SAMPLINGS[kind], known=ids[:cut], graphs=GRAPHS, lookahead=1)
    assert again == ids
    assert (repeated == numbers).all()


def test_known_ids_are_taken_although_others_would_be_drawn() -> None:
    ids, _ = scored(SAMPLINGS["greedy"])
    known = [(token + 7) % VOCAB for token in ids[:5]]
    again, numbers = scored(SAMPLINGS["greedy"], known=known)
    assert again[:5] == known
    check(again, numbers)


def test_suppressed_ids_count_in_the_distribution() -> None:
    spec = replace(LM, sampling=Sampling(port="token", suppress=(range(20),)))
    ids, numbers = scored(SamplingParams(logprobs=3), spec=spec, module=TinyLM())
    assert min(ids) >= 20
    check(ids, numbers)
