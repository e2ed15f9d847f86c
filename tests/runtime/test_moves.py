"""Caches that move between ranks: deployments with walks of one node on different ranks, served by real processes."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import httpx
import pytest

from mstar_core.config.deployment import NodePlacement, Plan, RankPlan
from tests.runtime.deployment import LLM, SNAC, Deployment

PREFILL_APART = Plan(
    ranks=(RankPlan(rank=0, device="cpu", nodes=(LLM,)), RankPlan(rank=1, device="cpu", nodes=(LLM, SNAC))),
    placements=(
        NodePlacement(node=LLM, replicas=((0,),), walks=("prefill",)),
        NodePlacement(node=LLM, replicas=((1,),), walks=("decode",)),
        NodePlacement(node=SNAC, replicas=((1,),)),
    ),
)
SPEECH = {"input": "Hello there, how are you?", "voice": "tara", "response_format": "pcm", "model": "orpheus"}


def speak(server: Deployment, **params: object) -> bytes:
    answer = httpx.post(f"{server.url}/v1/audio/speech", json={**SPEECH, **params}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.fixture(scope="module")
def colocated() -> Iterator[Deployment]:
    with Deployment(name="whole") as running:
        yield running


@pytest.fixture(scope="module")
def apart() -> Iterator[Deployment]:
    with Deployment(name="apart", where=PREFILL_APART) as running:
        yield running
        running.assert_clean()


GREEDY = {"temperature": 0, "max_output_tokens": 120, "ignore_eos": True, "seed": 5}


@pytest.mark.parametrize(
    "params",
    [GREEDY, {**GREEDY, "temperature": 0.7}, {**GREEDY, "repetition_penalty": 1, "flush": True}],
    ids=["greedy", "sampled", "flushed"],
)
def test_speech_equals_that_of_one_rank(params: dict[str, object], colocated: Deployment, apart: Deployment) -> None:
    sound = speak(apart, **params)
    assert len(sound) > 10_000
    assert sound == speak(colocated, **params)


def test_requests_side_by_side_do_not_mix(colocated: Deployment, apart: Deployment) -> None:
    texts = [f"This is sentence number {number}." for number in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda text: speak(apart, input=text, **GREEDY), texts))
    assert found == [speak(colocated, input=text, **GREEDY) for text in texts]
    assert len(set(found)) == len(texts)


def test_a_prompt_whose_first_id_is_the_last(apart: Deployment) -> None:
    assert speak(apart, temperature=0, max_output_tokens=1) == b""
