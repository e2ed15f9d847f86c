"""SIGKILL of the api while it streams chat answers or a response, and while a request is being received."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from tests.runtime.client import LIMIT_S, new_client
from tests.runtime.deployment import until
from tests.survival.families import FAMILIES
from tests.survival.mortal import Mortal

COUNT: Final = 3
CHAT: Final[dict[str, Any]] = {
    "model": "qwen3_omni",
    "messages": [{"role": "user", "content": "How many shapes are there?"}],
    "modalities": ["text"],
    "stream": True,
    "n": COUNT,
    "seed": 3,
    "temperature": 0.8,
    "ignore_eos": True,
    "max_tokens": 24,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def deployment() -> Iterator[Mortal]:
    with Mortal(FAMILIES["qwen3_omni"]) as running:
        yield running


RESPONSE: Final[dict[str, Any]] = {
    "input": "How many shapes are there?",
    "stream": True,
    "seed": 3,
    "temperature": 0.8,
    "ignore_eos": True,
    "max_output_tokens": 24,
}


def kill_api(deployment: Mortal) -> None:
    """Kill the api with SIGKILL."""
    deployment.kill(deployment.pids()["api"])


async def events(deployment: Mortal, killed_at: int | None = None) -> list[dict[str, Any]]:
    """Return the events of one request. killed_at: number of events that the client has when the api is killed."""
    received: list[dict[str, Any]] = []
    async with new_client(deployment.url) as client, client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
        assert answer.status_code == 200
        lines = [line async for line in _data(answer, received, deployment, killed_at)]
    assert lines[-1] == "[DONE]"
    return received


async def _data(
    answer: httpx.Response, received: list[dict[str, Any]], deployment: Mortal, killed_at: int | None
) -> Any:
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            if data != "[DONE]":
                received.append(json.loads(data))
                if len(received) == killed_at:
                    kill_api(deployment)
            yield data


def texts(received: list[dict[str, Any]]) -> list[str]:
    """Return the text of each answer."""
    parts: list[list[str]] = [[] for _ in range(COUNT)]
    for event in received:
        for choice in event["choices"]:
            parts[choice["index"]].append(choice["delta"].get("content") or "")
    return ["".join(each) for each in parts]


def ends(received: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return the end of each answer."""
    return sorted(
        (choice["index"], choice["finish_reason"])
        for event in received
        for choice in event["choices"]
        if choice["finish_reason"]
    )


async def response_events(deployment: Mortal, killed_at: int | None = None) -> list[dict[str, Any]]:
    """Return the events of one response. killed_at: as for `events`."""
    received: list[dict[str, Any]] = []
    async with new_client(deployment.url) as client, client.stream("POST", "/v1/responses", json=RESPONSE) as answer:
        assert answer.status_code == 200
        async for _ in _data(answer, received, deployment, killed_at):
            pass
    return received


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Return what two responses to one request have in common."""
    output = [{**item, "id": ""} for item in response["output"]]
    return {**response, "output": output, "id": "", "created_at": 0, "completed_at": 0}


async def test_a_response_goes_on_and_stored_ones_are_there(deployment: Mortal) -> None:
    calm = await response_events(deployment)
    stored = [calm[-1]["response"]]
    for killed_at in (1, len(calm) // 2, len(calm) - 1):
        received = await response_events(deployment, killed_at)
        assert [event["sequence_number"] for event in received] == list(range(len(received)))
        last = received[-1]["response"]
        assert received[-1]["type"] == "response.incomplete" and without_ids(last) == without_ids(stored[0])
        assert {event["response"]["id"] for event in received if "response" in event} == {last["id"]}
        stored.append(last)
        async with new_client(deployment.url) as client:
            for response in stored:
                answer = await client.get(f"/v1/responses/{response['id']}")
                assert answer.json() == response
        await asyncio.to_thread(until, lambda: deployment.admin("/v1")["state"] == "ready", "ready again")
    await asyncio.to_thread(deployment.assert_clean)


async def test_several_answers_of_one_response_go_on(deployment: Mortal) -> None:
    calm = await events(deployment)
    total = len(calm)
    for killed_at in (1, total // 3, total - COUNT):
        received = await events(deployment, killed_at)
        assert texts(received) == texts(calm) and all(texts(calm))
        assert ends(received) == ends(calm)
        assert [event["usage"] for event in received if event.get("usage")] == [
            event["usage"] for event in calm if event.get("usage")
        ]
        assert len({(event["id"], event["created"]) for event in received}) == 1
        await asyncio.to_thread(until, lambda: deployment.admin("/v1")["state"] == "ready", "ready again")
    await asyncio.to_thread(deployment.assert_clean)


async def test_a_request_that_is_being_received_is_received_to_its_end(deployment: Mortal) -> None:
    body = json.dumps({**CHAT, "stream": False, "n": 1}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
    async with asyncio.timeout(LIMIT_S):
        writer.write(head.encode() + body[:40])
        await writer.drain()
        await asyncio.sleep(0.5)  # no event tells that the api has read a part of a body
        await asyncio.to_thread(kill_api, deployment)
        writer.write(body[40:])
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"]
