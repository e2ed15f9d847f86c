"""Bad input and crowds against real processes: the right refusal, neighbours unharmed, nothing kept."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.runtime.client import LIMIT_S, SURE, Heard, Streams, new_client, request, speak
from tests.runtime.crowd import descriptors, resident
from tests.runtime.deployment import PATIENT_S, Deployment, until

SLOTS, QUEUE = 4, 8
CROWD = 200
OFFERED = 600
"""Requests after which the memory of the api is that of its busiest moments."""


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    limits: dict[str, Any] = {"max_concurrent_requests": SLOTS, "max_queue": QUEUE, "hang_s": PATIENT_S}
    with Deployment(api={"strict_model": True}, **limits) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(deployment: Deployment) -> Iterator[None]:
    yield
    deployment.assert_clean()


async def post(deployment: Deployment, body: dict[str, Any]) -> Heard:
    async with new_client(deployment.url) as client:
        return await speak(client, body)


@pytest.mark.parametrize(
    ("given", "status", "code", "param"),
    [
        ({"voice": "nobody"}, 400, "invalid_value", "voice"),
        ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
        ({"temperature": 2.5}, 400, "invalid_value", "temperature"),
        ({"temperature": -1}, 400, "invalid_value", "temperature"),
        ({"top_p": 0}, 400, "invalid_value", "top_p"),
        ({"top_k": 1.5}, 400, "invalid_value", "top_k"),
        ({"repetition_penalty": 0.5}, 400, "invalid_value", "repetition_penalty"),
        ({"max_output_tokens": 0}, 400, "invalid_value", "max_output_tokens"),
        ({"seed": -1}, 400, "invalid_value", "seed"),
        ({"seed": 10**30}, 400, "invalid_value", "seed"),
        ({"noise": "loud"}, 400, "invalid_value", "noise"),
        ({"flush": "perhaps"}, 400, "invalid_value", "flush"),
        ({"temprature": 0.5}, 400, "unknown_parameter", "temprature"),
        ({"text": ""}, 400, "missing_field", "text"),
        ({"text": " \n\t"}, 400, "missing_field", "text"),
        ({"text": 7}, 400, "invalid_value", "text"),
        ({"text": "word " * 3000}, 400, "context_length_exceeded", "text"),
        ({"prompt_token_ids": []}, 400, "invalid_value", "prompt_token_ids"),
        ({"prompt_token_ids": [10**9]}, 400, "invalid_value", "prompt_token_ids"),
        ({"prompt_token_ids": ["a"]}, 400, "invalid_value", "prompt_token_ids"),
        ({"model": "whisper"}, 404, "model_not_found", "model"),
        ({"output_modalities": ["image"]}, 400, "unknown_modality", "output_modalities"),
        ({"request_id": "a b\n"}, 400, "invalid_value", "request_id"),
        ({"timeout_s": 0}, 400, "invalid_value", "timeout_s"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
async def test_a_bad_field_is_named(
    given: dict[str, Any], status: int, code: str, param: str, deployment: Deployment
) -> None:
    heard = await post(deployment, {**request(), **given})
    assert (heard.status, heard.code, heard.body["error"]["param"]) == (status, code, param)
    assert not any(word in heard.message for word in (str(deployment.root), ".py", "Traceback"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"text": "a", "text": "b"}',
        b'{"text": NaN}',
        b"\xff\xfe",
        b'{"text": "\\ud800"}',
        b"[" * 5000,
    ],
)
async def test_broken_json_is_refused(body: bytes, deployment: Deployment) -> None:
    async with new_client(deployment.url) as client:
        answer = await client.post("/generate", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_bad_request_disturbs_no_good_one(deployment: Deployment) -> None:
    good = request(**SURE, max_output_tokens=80)
    bad = [request(temperature="hot"), request(voice="nobody"), request(prompt_token_ids=[10**9])]
    wanted = (await post(deployment, good)).pcm
    async with Streams(deployment.url, [good, *bad, good, *bad]) as streams:
        heard = await streams.all_ended()
    assert [each.pcm for each in heard if each.status == 200] == [wanted, wanted]
    assert {each.status for each in heard} == {200, 400}


async def test_an_id_in_flight_is_refused_and_may_be_used_again(deployment: Deployment) -> None:
    body = request(**SURE, max_output_tokens=150, request_id="mine")
    async with Streams(deployment.url, [body]) as streams:
        with deployment.paused("worker-0"):
            await asyncio.to_thread(until, lambda: deployment.value("conductor.in_flight") == 1, "the first request")
            second = await post(deployment, body)
        assert (second.status, second.code) == (409, "request_id_in_use")
        [first] = await streams.all_ended()
    assert first.is_whole
    assert (await post(deployment, body)).pcm == first.pcm


async def test_a_crowd_is_served_or_refused_and_forgotten(deployment: Deployment) -> None:
    body = request(**SURE, max_output_tokens=35)
    wanted = (await post(deployment, body)).pcm
    async with Streams(deployment.url, [body] * CROWD) as streams:
        with deployment.paused("worker-0"):  # or a quick machine might serve as fast as a slow client sends
            await streams.some_ended(CROWD // 2)
        heard = await streams.all_ended()
    assert {each.status for each in heard} == {200, 429}
    served = [each for each in heard if each.status == 200]
    assert len(served) >= SLOTS + QUEUE
    assert all(each.is_whole and each.pcm == wanted for each in served)
    refused = [each for each in heard if each.status == 429]
    assert all(1 <= int(each.headers["retry-after"]) <= 60 and each.code == "queue_full" for each in refused)
    assert (await post(deployment, body)).pcm == wanted


async def test_twenty_times_the_capacity_is_served_or_refused_in_flat_memory(
    deployment: Deployment, record_property: Callable[[str, object], None]
) -> None:
    body = request(**SURE, max_output_tokens=20)
    wanted, statuses = (await post(deployment, body)).pcm, Counter[int]()

    async def insist(client: httpx.AsyncClient, count: int) -> None:
        while statuses.total() < count:
            heard = await speak(client, body)
            statuses[heard.status] += 1
            assert heard.pcm == wanted if heard.status == 200 else heard.code == "queue_full"

    async def offer(count: int) -> int:
        async with new_client(deployment.url) as client:
            await asyncio.gather(*(insist(client, count) for _ in range(20 * SLOTS)))
        await asyncio.to_thread(deployment.assert_clean)
        return resident(deployment)["api"]

    before = await offer(OFFERED)
    after = await offer(3 * OFFERED)
    assert set(statuses) == {200, 429}
    assert after - before < 8 << 20
    record_property("requests_offered_at_20_times_capacity", statuses.total())
    record_property("requests_lost", 0)


async def test_an_api_out_of_descriptors_serves_on_and_recovers(deployment: Deployment) -> None:
    body = request(**SURE, max_output_tokens=100)
    wanted, pid = (await post(deployment, body)).pcm, deployment.pids()["api"]
    room, limits = descriptors(deployment)["api"] + 20, resource.prlimit(pid, resource.RLIMIT_NOFILE)
    async with Streams(deployment.url, [body] * 2) as streams:
        await streams.all_begun()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (room, limits[1]))
        idle = [socket.create_connection(("127.0.0.1", deployment.port)) for _ in range(60)]
        try:
            heard = await streams.all_ended()
            assert [each.pcm for each in heard] == [wanted] * 2
        finally:
            for connection in idle:
                connection.close()
        assert (await post(deployment, body)).pcm == wanted
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert deployment.pids()["api"] == pid


@pytest.mark.parametrize("chunks", [0, 1, 5])
async def test_a_client_that_leaves_ends_its_work(chunks: int, deployment: Deployment) -> None:
    name = f"leaves-after-{chunks}"
    async with new_client(deployment.url) as client:
        body = request(**SURE, max_output_tokens=2000, request_id=name)
        heard = await speak(client, body, leave=lambda heard: len(heard.chunks) >= chunks)
    assert heard.done is None

    def ended() -> dict[str, Any] | None:  # the api may tell of it for the first time when it has ended
        items = deployment.admin("/v1/requests")["items"]
        return next((item for item in items if item["id"] == name and item["ended"] is not None), None)

    found = await asyncio.to_thread(until, ended, "its end")
    assert found["state"] == "cancelled" and found["tokens"] < 2000


async def test_clients_that_leave_free_the_queue_for_others(deployment: Deployment) -> None:
    long = request(**SURE, max_output_tokens=2000)
    async with Streams(deployment.url, [long] * (SLOTS + QUEUE)) as leaving:
        async with asyncio.timeout(LIMIT_S):
            waits = [asyncio.create_task(heard.first.wait()) for heard in leaving.heard]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
    heard = Heard()
    while heard.status != 200:  # the last of them may hold its place for a moment
        heard = await post(deployment, request(**SURE, max_output_tokens=30))
        assert heard.status in (200, 429)
    assert heard.is_whole


async def test_a_cancel_by_id_ends_the_stream_with_one_error(deployment: Deployment) -> None:
    async with Streams(deployment.url, [request(**SURE, max_output_tokens=2000, request_id="stop-me")]) as streams:
        await streams.all_begun()
        with deployment.paused("worker-0"):  # so that the stream does not end before
            async with new_client(deployment.url) as client:
                answer = await client.post("/v1/requests/stop-me/cancel")
        assert answer.status_code in (200, 202), answer.text
        [heard] = await streams.all_ended()
    assert [error["code"] for error in heard.errors] == ["cancelled"] and heard.done is None and not heard.cut


async def test_a_deadline_ends_the_stream_with_one_error(deployment: Deployment) -> None:
    limit_s, heard = 0.5, Heard()
    while not heard.chunks and limit_s < LIMIT_S:  # a busy machine may take longer to the first sound
        limit_s *= 2
        heard = await post(deployment, request(**SURE, max_output_tokens=2000, timeout_s=limit_s))
    assert [error["status"] for error in heard.errors] == [504] and heard.done is None and not heard.cut
    assert heard.chunks
