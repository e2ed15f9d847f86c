"""The speech model's golden vectors over HTTP, served by real processes: colocated, split and replicated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.runtime.client import LIMIT_S, SURE, Heard, Streams, new_client, request, speak
from tests.runtime.deployment import LLM, SNAC, Deployment, plan, until
from tests.runtime.golden import LONG, PROMPTS, SHORT, WINDOW, Built, Golden, prompt_of

LONGEST = 160
PLACEMENTS = {"split": {0: (LLM,), 1: (SNAC,)}, "doubled": {0: (LLM, SNAC), 1: (LLM, SNAC)}}
LIMITS = {"max_seq_len": 1024}


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.find()


@pytest.fixture(scope="module")
def folder(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden.lay_out(tmp_path_factory.mktemp("golden") / "checkpoint")


@pytest.fixture(scope="module")
def built(folder: Path) -> Built:
    return Built.load(folder)


@pytest.fixture(scope="module")
def colocated(folder: Path) -> Iterator[Deployment]:
    with Deployment(folder=folder, **LIMITS) as deployment:
        yield deployment


@pytest.fixture(scope="module", params=list(PLACEMENTS))
def placed(request: pytest.FixtureRequest, folder: Path) -> Iterator[Deployment]:
    with Deployment(folder=folder, where=plan(PLACEMENTS[request.param]), **LIMITS) as deployment:
        yield deployment


def say(golden: Golden, index: int, **params: Any) -> dict[str, Any]:
    return request(prompt_token_ids=golden.prompt(index), **{**SURE, **params})


async def hear(deployment: Deployment, *bodies: dict[str, Any]) -> list[Heard]:
    """Send all requests at once and read each to its end."""
    async with new_client(deployment.url) as client:
        heard = await asyncio.gather(*(speak(client, body) for body in bodies))
    assert all(each.is_whole for each in heard), [each.body or each.errors for each in heard]
    return heard


def assert_same_sound(given: bytes, wanted: bytes) -> None:
    """Compare length and samples. Different processes may round differently by one step."""
    assert len(given) == len(wanted)
    one, other = (np.frombuffer(data, "<i2").astype(np.int32) for data in (given, wanted))
    assert int(np.abs(one - other).max(initial=0)) <= 2


@pytest.mark.parametrize("index", PROMPTS)
@pytest.mark.parametrize("is_penalised", [False, True], ids=["plain", "penalised"])
async def test_greedy_ids_as_sound(
    is_penalised: bool, index: int, golden: Golden, built: Built, colocated: Deployment
) -> None:
    ids = golden.greedy(index, is_penalised=is_penalised)
    body = say(golden, index, repetition_penalty=golden.penalty if is_penalised else 1, max_output_tokens=len(ids))
    [heard] = await hear(colocated, body)
    wanted = built.sound(ids)
    if not wanted:
        pytest.skip("runs when MSTAR_GOLDEN names a set whose greedy ids contain a whole window")
    assert_same_sound(heard.pcm, wanted)
    assert heard.done is not None
    assert (heard.done["finish_reason"], heard.done["usage"]["completion_tokens"]) == ("length", len(ids))
    colocated.assert_clean()


async def test_longer_greedy_ids_at_once_with_different_lengths(
    golden: Golden, built: Built, colocated: Deployment
) -> None:
    counts = [LONGEST, 60, LONGEST - 9, 48]
    bodies = [say(golden, prompt_of(n), max_output_tokens=count) for n, count in enumerate(counts)]
    for heard, (number, count) in zip(await hear(colocated, *bodies), enumerate(counts), strict=True):
        assert_same_sound(heard.pcm, built.sound(built.continued(golden.prompt(prompt_of(number)), count)))
    colocated.assert_clean()


async def test_the_stop_id_ends_a_request_unless_ignored(golden: Golden, built: Built, colocated: Deployment) -> None:
    ids = golden.greedy(LONG, is_penalised=True)
    if built.stop_id not in ids:
        pytest.skip("runs when MSTAR_GOLDEN names a set whose greedy ids contain the stop id")
    place = ids.index(built.stop_id)
    body = say(golden, LONG, repetition_penalty=golden.penalty, max_output_tokens=len(ids), ignore_eos=False)
    [heard] = await hear(colocated, body)
    assert heard.done is not None and heard.done["finish_reason"] == "stop"
    assert_same_sound(heard.pcm, built.sound(ids[:place]))


async def test_too_few_ids_for_sound_end_empty_and_say_so(golden: Golden, colocated: Deployment) -> None:
    for count in (1, WINDOW - 8):
        [heard] = await hear(colocated, say(golden, SHORT, max_output_tokens=count))
        assert heard.pcm == b"" and heard.done is not None
        assert any("too short" in warning for warning in heard.done["warnings"])
    colocated.assert_clean()


async def test_the_same_seed_gives_the_same_bytes_whatever_shares_the_batch(
    golden: Golden, colocated: Deployment
) -> None:
    drawn = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "noise": "seeded", "max_output_tokens": 140}
    mine = [say(golden, prompt_of(n), **{**drawn, "seed": 100 + n}) for n in range(3)]
    others = [say(golden, prompt_of(n), **{**drawn, "seed": n, "max_output_tokens": 30 + 20 * n}) for n in range(8)]
    alone = [(await hear(colocated, body))[0].pcm for body in mine]
    together = await hear(colocated, *others[:4], *mine, *others[4:])
    again = await hear(colocated, *mine[::-1])
    assert [heard.pcm for heard in together[4:7]] == alone
    assert [heard.pcm for heard in again[::-1]] == alone
    assert len({*alone}) == len(mine), "different seeds differ"
    colocated.assert_clean()


async def test_other_placements_give_the_bytes_of_one_rank(
    golden: Golden, colocated: Deployment, placed: Deployment
) -> None:
    drawn = {"temperature": 0.9, "noise": "seeded", "seed": 5}
    bodies = [say(golden, prompt_of(n), max_output_tokens=70 + 15 * n, **(drawn if n > 1 else {})) for n in range(4)]
    wanted, given = await hear(colocated, *bodies), await hear(placed, *bodies)
    assert [heard.pcm for heard in given] == [heard.pcm for heard in wanted]
    assert all(heard.pcm for heard in given)
    placed.assert_clean()


async def test_replicas_share_the_requests(folder: Path, golden: Golden, placed: Deployment) -> None:
    bodies = [say(golden, SHORT, max_output_tokens=200) for _ in range(4)]
    async with Streams(placed.url, bodies) as streams:
        await streams.all_begun()
        heard = await streams.all_ended()
    assert len({each.pcm for each in heard}) == 1
    for rank in (0, 1):
        until(lambda name=f"worker-{rank}.steps": placed.value(name), f"steps of rank {rank}")
    placed.assert_clean()


async def test_a_lost_rank_frees_what_its_requests_held_elsewhere(golden: Golden, placed: Deployment) -> None:
    [wanted] = await hear(placed, say(golden, SHORT, max_output_tokens=90))
    lives = 0
    while not placed.has_event("request.resumed"):  # on a busy machine all may have ended before the kill
        pid = placed.pids()["worker-1"]
        async with Streams(placed.url, [say(golden, prompt_of(n), max_output_tokens=450) for n in range(4)]) as streams:
            await streams.all_begun()
            placed.kill(pid)
            heard = await streams.all_ended()
        lives += 1
        assert all(each.is_whole for each in heard)
        placed.wait_again_ready(lives)
    placed.assert_clean()
    [again] = await hear(placed, say(golden, SHORT, max_output_tokens=90))
    assert again.pcm == wanted.pcm


async def test_speech_route_sends_the_same_samples_as_a_file(colocated: Deployment, golden: Golden) -> None:
    body = {"model": "orpheus", "input": "x", "response_format": "pcm", "max_output_tokens": 90}
    extra = {name: value for name, value in say(golden, SHORT).items() if name in SURE or name == "prompt_token_ids"}
    async with httpx.AsyncClient(base_url=colocated.url, timeout=LIMIT_S) as client:
        answer = await client.post("/v1/audio/speech", json={**body, **extra})
    [heard] = await hear(colocated, say(golden, SHORT, max_output_tokens=90))
    assert answer.status_code == 200, answer.text
    assert answer.content == heard.pcm and heard.pcm
