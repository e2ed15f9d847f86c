"""SIGKILL of the api in the middle of responses: on plain HTTP each client gets one complete answer, as undisturbed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.runtime.client import LIMIT_S, SURE, Heard, new_client, request, speak
from tests.runtime.deployment import PATIENT_S, Deployment, until

BODY = request(**SURE, max_output_tokens=160)
SPEECH = {"model": "orpheus", "input": "hello there", "seed": 3, "response_format": "wav", "max_output_tokens": 160}
ENDLESS = {"max_output_tokens": 2000}
KILLED_AT = (1, 12)
"""Lines with audio that the client has when the api is killed."""


@pytest.fixture(scope="module")
def served() -> Iterator[Deployment]:
    """A deployment for five deaths; after the sixth one it would be unhealthy."""
    with Deployment(max_concurrent_requests=8, hang_s=PATIENT_S) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def another() -> Iterator[Deployment]:
    """A deployment for the next five."""
    with Deployment(max_concurrent_requests=8) as deployment:
        yield deployment


def kill_api(deployment: Deployment) -> None:
    """Kill the api with SIGKILL."""
    deployment.kill(deployment.pids()["api"])


def again_ready(deployment: Deployment) -> None:
    """Wait until every process is ready, and check that nothing is held and no connection is kept."""
    until(lambda: deployment.admin("/v1")["state"] == "ready", "ready again")
    deployment.assert_clean()
    until(lambda: not kept_descriptors(deployment), "the end of every recording")


def kept_descriptors(deployment: Deployment) -> int:
    """Count the supervisor's memory files of connections."""
    assert deployment.process is not None
    folder = Path(f"/proc/{deployment.process.pid}/fd")
    return sum("mstar-connection" in os.readlink(path) for path in folder.iterdir() if path.is_symlink())


async def killed_at(deployment: Deployment, lines: int) -> Heard:
    """Send a request, and kill the api when so many lines with audio have come."""

    def kill(heard: Heard) -> bool:
        if len(heard.chunks) == lines:
            kill_api(deployment)
        return False

    async with new_client(deployment.url) as client:
        return await speak(client, BODY, Heard(), kill)


async def pieces(client: httpx.AsyncClient, body: dict[str, object], killed: Deployment | None = None) -> bytes:
    """Return the sound of /v1/audio/speech. killed: the deployment whose api is killed after the first piece."""
    data = b""
    async with client.stream("POST", "/v1/audio/speech", json=body) as answer:
        assert answer.status_code == 200
        async for piece in answer.aiter_bytes():
            if killed is not None and not data:
                kill_api(killed)
            data += piece
    return data


async def test_a_stream_of_lines_goes_on_where_it_was(served: Deployment) -> None:
    async with new_client(served.url) as client:
        calm = await speak(client, BODY)
    assert calm.is_whole and calm.done is not None
    for lines in KILLED_AT:
        heard = await killed_at(served, lines)
        assert heard.is_whole, heard
        assert heard.pcm == calm.pcm
        assert heard.done is not None and heard.done["finish_reason"] == calm.done["finish_reason"]
        first_ms = 1000 * (heard.chunk_s[0] - heard.sent_s)
        assert heard.done["usage"]["ttft_ms"] <= first_ms, "the first output is that of the first api"
        await asyncio.to_thread(again_ready, served)


@pytest.mark.parametrize("options", [{"stream": True}, {"stream": True, "response_format": "pcm"}, {}], ids=str)
async def test_speech_is_the_same_as_undisturbed(served: Deployment, options: dict[str, object]) -> None:
    body = {**SPEECH, **options}
    async with new_client(served.url) as client:
        calm = await pieces(client, body)
        if options:
            heard = await pieces(client, body, killed=served)
        else:  # a response that has not begun is made again
            with served.paused("worker-0"):
                waiting = asyncio.create_task(pieces(client, body))
                await asyncio.to_thread(until, lambda: served.value("conductor.in_flight"), "the request")
                await asyncio.to_thread(kill_api, served)
            heard = await waiting
    assert heard == calm
    await asyncio.to_thread(again_ready, served)


async def test_a_request_cancelled_during_the_restart_ends_with_an_error_line(another: Deployment) -> None:
    async with new_client(another.url) as client:
        cancels: list[asyncio.Task[httpx.Response]] = []

        def strike(heard: Heard) -> bool:
            if len(heard.chunks) == 1 and not cancels:
                kill_api(another)
                cancels.append(asyncio.ensure_future(client.post("/v1/requests/cancelled-1/cancel")))
            return False

        heard = await speak(client, {**BODY, **ENDLESS, "request_id": "cancelled-1"}, Heard(), strike)
        answer = await cancels[0]
    assert answer.status_code < 300
    assert (heard.cut, heard.code) == (False, "cancelled"), heard
    await asyncio.to_thread(again_ready, another)


async def test_connections_are_answered_and_never_refused_during_the_restart(another: Deployment) -> None:
    kill_api(another)
    answers = []
    async with new_client(another.url) as client:
        async with asyncio.timeout(LIMIT_S):
            while not answers or another.admin("/v1")["state"] != "ready":
                answers.append((await client.get("/v1/models")).status_code)
        heard = await speak(client, BODY)
    assert set(answers) == {200} and heard.is_whole
    await asyncio.to_thread(again_ready, another)


async def test_an_idle_connection_stays_open(another: Deployment) -> None:
    async with httpx.AsyncClient(base_url=another.url, timeout=LIMIT_S) as client:
        first = await client.get("/v1/models")
        stream = first.extensions["network_stream"].get_extra_info("client_addr")
        kill_api(another)
        second = await client.get("/v1/models")
        assert second.extensions["network_stream"].get_extra_info("client_addr") == stream
    await asyncio.to_thread(again_ready, another)
