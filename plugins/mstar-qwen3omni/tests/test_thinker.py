"""The thinker against the reference: hidden states, logits, greedy ids; in pieces, in batches, in the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_qwen3omni.checkpoint.config import read_config
from mstar_qwen3omni.thinker.thinker import Thinker

from .thinker_cases import (
    CASES,
    FOLDER,
    STATES,
    Case,
    DenseCache,
    answers,
    golden_thinker,
    made_engine,
    needs_weights,
    prefill,
    read,
)

pytestmark = needs_weights


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def thinker() -> Thinker:
    return golden_thinker()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return read(request.param)


def test_hidden_states_and_logits_of_the_prompt_equal_the_reference(thinker: Thinker, case: Case) -> None:
    actual, expected = prefill(thinker, case, DenseCache(), []), case.tensors
    torch.testing.assert_close(actual["hidden"], expected["thinker_last_hidden"], atol=STATES, rtol=0)
    torch.testing.assert_close(actual["states"], expected["thinker_accept_hidden"], atol=STATES, rtol=0)
    torch.testing.assert_close(thinker.head(actual["hidden"]), expected["thinker_prefill_logits"], atol=STATES, rtol=0)


def test_a_prompt_in_pieces_equals_the_whole(thinker: Thinker, case: Case) -> None:
    count = len(case.tokens)
    whole = prefill(thinker, case, DenseCache(), [])
    pieces = prefill(thinker, case, DenseCache(), [count // 3, count // 3 + 1, 2 * count // 3])
    for name, value in whole.items():
        torch.testing.assert_close(pieces[name], value, atol=1e-4, rtol=1e-4)


def test_greedy_steps_equal_the_reference(thinker: Thinker, case: Case) -> None:
    cache, expected = DenseCache(), case.tensors
    logits = [thinker.head(prefill(thinker, case, cache, [])["hidden"][-1:])[0]]
    torch.testing.assert_close(logits[0], expected["thinker_first_logits"], atol=STATES, rtol=0)
    for step in range(len(case.answer) - 1):
        position = expected["thinker_decode_position_ids"][:, step : step + 1].float()
        assert torch.equal(position, (case.positions.max() + 1 + step).expand(3, 1))
        hidden = thinker(kv=cache, positions=position[0], tokens=logits[-1].argmax()[None])["hidden"]
        logits.append(thinker.head(hidden)[0])
    assert [int(row.argmax()) for row in logits] == case.answer.tolist()
    torch.testing.assert_close(torch.stack(logits), expected["thinker_step_logits"], atol=STATES, rtol=0)


def test_a_batch_equals_each_request_alone(thinker: Thinker) -> None:
    cases, cache = [read(name) for name in CASES], DenseCache()
    cache.lengths = [len(case.tokens) for case in cases]
    together = thinker(
        kv=cache,
        positions=torch.cat([case.positions for case in cases], dim=1),
        tokens=torch.cat([case.tokens for case in cases]),
        embeds=torch.cat([case.embeds for case in cases]),
        deepstack=torch.cat([case.deepstack for case in cases], dim=1),
    )["hidden"].split(cache.lengths)
    for case, actual in zip(cases, together, strict=True):
        torch.testing.assert_close(actual, case.tensors["thinker_last_hidden"], atol=STATES, rtol=0)


def test_decode_returns_no_states(thinker: Thinker) -> None:
    assert list(thinker(kv=DenseCache(), positions=torch.zeros(1), tokens=torch.zeros(1, dtype=torch.int64))) == [
        "hidden"
    ]


# -- through the engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [24, 256])
def test_captured_prompt_passes_give_the_same_answers(thinker: Thinker, budget: int) -> None:
    """Media with deep feature maps, audio and placed text; a budget of 24 cuts them."""
    cases = [read(name) for name in CASES]
    engine = made_engine(thinker, cases, token_budget=budget, graphs=CaptureSizes(decode=(8,), prefill=(64,)))
    plain = answers(thinker, cases, token_budget=budget)
    learned = answers(thinker, cases, engine=engine)
    while engine.idle():
        pass
    before = engine.counters()
    captured = answers(thinker, cases, engine=engine)
    after = engine.counters()
    assert plain[0] == learned[0] == captured[0] == [case.answer.tolist() for case in cases]
    for mine, other in zip(captured[1], plain[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-4)
    assert after["prefill_hits"] > before["prefill_hits"] and after["prefill_misses"] == before["prefill_misses"]


@pytest.mark.parametrize("budget", [16, 256], ids=["chunked", "whole"])
def test_the_paged_engine_gives_the_answers_of_the_reference(thinker: Thinker, budget: int) -> None:
    cases = [read(name) for name in CASES]
    ids, states = answers(thinker, cases, token_budget=budget)
    assert dict(zip(CASES, ids, strict=True)) == {name: read(name).answer.tolist() for name in CASES}
    special = read_config(FOLDER).ids
    for case, actual in zip(cases, states, strict=True):
        pads = torch.isin(case.tokens, torch.tensor([special.image_pad, special.video_pad, special.audio_pad]))
        if pads.any():
            torch.testing.assert_close(actual, case.tensors["thinker_accept_hidden"][pads], atol=STATES, rtol=0)


def test_alone_in_the_engine_equals_the_batch(thinker: Thinker, case: Case) -> None:
    assert answers(thinker, [case])[0] == [case.answer.tolist()]
