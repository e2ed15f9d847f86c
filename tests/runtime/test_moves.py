"""Caches that move between ranks: deployments with walks of one node on different ranks, served by real processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mstar_core.config.deployment import NodePlacement, Plan, RankPlan
from mstar_core.config.resolved import TransportConfig
from tests.fakes.mooncake import needs_mooncake, transfer_ports
from tests.runtime.client import SURE, Streams, request
from tests.runtime.deployment import LLM, PATIENT_S, SNAC, Deployment, until

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


def test_a_move_is_in_the_trace_of_its_request_and_among_the_edges(apart: Deployment) -> None:
    answer = httpx.post(f"{apart.url}/v1/audio/speech", json={**SPEECH, **GREEDY, "request_id": "told"}, timeout=60)
    assert answer.status_code == 200, answer.text

    def transfer() -> dict[str, Any] | None:
        sums = apart.admin("/v1/requests/told/trace")["sums"]
        return next((each for each in sums if (each["node"], each["kind"]) == ("LLM cache", "transfer")), None)

    found = until(transfer, "the span of the move")
    assert (found["process"], found["walk"], found["count"]) == ("worker-1", "decode", 1)
    assert found["size_bytes"] > 0 and found["end_ms"] >= found["start_ms"]
    edge = until(lambda: apart.snapshot()["edges"].get("LLM cache@0>1"), "the edge")
    assert (edge["source"], edge["into"]) == ("LLM", "LLM") and edge["bytes"] >= found["size_bytes"]
    described = apart.shown("describe", f"deployment/{apart.name}")
    assert "  LLM          rank 0 for prefill; rank 1 for decode\n" in described
    assert re.search(r"  0 > 1 +LLM cache  \d+ transfers?, .*iB; now .*/s", described), described


SOURCE, TARGET = "worker-0", "worker-1"
PHASES = {"before the move": SOURCE, "on the way": TARGET, "after the move": None}
"""Phases of a move, and the worker that is suspended so that the requests are in that phase."""

PARTS = [pytest.param(phase, marks=[] if phase == "on the way" else pytest.mark.slow) for phase in PHASES]


@pytest.fixture(scope="module", params=["SHM", pytest.param("TCP", marks=needs_mooncake)])
def mortal(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    transport = TransportConfig(protocol=request.param, port=transfer_ports())
    with Deployment(name="mortal", where=PREFILL_APART, hang_s=PATIENT_S, transport=transport) as running:
        yield running


def test_caches_by_each_transport_give_the_speech_of_one_rank(colocated: Deployment, mortal: Deployment) -> None:
    sentence = {**GREEDY, "input": " ".join(f"This is sentence number {number}." for number in range(60))}
    expected = speak(colocated, **sentence)
    assert len(expected) > 10_000
    assert speak(mortal, **sentence) == expected
    if mortal.spec().transport.protocol != "SHM":
        until(lambda: mortal.value(f"{SOURCE}.peer_sent_bytes") > 1 << 17, "bytes by the network")


def parked(deployment: Deployment) -> int:
    """Return how many requests have been parked so far."""
    return sum(event["type"] == "request.parked" for event in deployment.events())


@pytest.mark.parametrize("victim", [SOURCE, TARGET])
@pytest.mark.parametrize("phase", PARTS)
async def test_a_death_changes_no_sound_and_leaves_nothing(phase: str, victim: str, mortal: Deployment) -> None:
    until(lambda: mortal.admin("/v1")["state"] == "ready", "ready")
    wanted, pids, before = speak(mortal, **GREEDY), mortal.pids(), int(mortal.admin("/v1")["restarts"])
    suspended, sent, seen = PHASES[phase], mortal.value(f"{SOURCE}.moves_sent"), parked(mortal)
    if suspended is not None:
        mortal.kill(pids[suspended], signal.SIGSTOP)
    async with Streams(mortal.url, [request(**SURE, max_output_tokens=200)] * 4) as streams:
        if suspended is None:
            await streams.all_begun()
        elif suspended == TARGET:
            await asyncio.to_thread(until, lambda: mortal.value(f"{SOURCE}.moves_sent") == sent + 4, "the exports")
        else:
            await asyncio.to_thread(until, lambda: mortal.value("conductor.in_flight") == 4, "the requests")
        mortal.kill(pids[victim])
        if suspended is not None and suspended != victim:
            await asyncio.to_thread(until, lambda: parked(mortal) == seen + 4, "the loss")
            mortal.kill(pids[suspended], signal.SIGCONT)
        heard = await streams.all_ended()
    assert all(each.is_whole for each in heard) and len({each.pcm for each in heard}) == 1
    mortal.wait_again_ready(before + 1)
    assert {name for name, pid in mortal.pids().items() if pids[name] != pid} == {victim}
    assert speak(mortal, **GREEDY) == wanted
    mortal.assert_clean()
