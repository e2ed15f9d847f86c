"""Streams of the client that reconnect: connections that are cut anywhere, refusals, and the end of the request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import openai
import pytest

from mstar_core.client import AsyncMStarClient, Chunk, MStarClient, Stream, StreamError
from tests.api.conftest import Api, running
from tests.fakes.conductor import begin, say
from tests.fakes.cutting_proxy import CuttingProxy
from tests.fakes.talk_model import SPEC as CHAT
from tests.sdk.conftest import SHARED, in_thread

ALL = ("text", "audio", "image", "video", "action", "scalar", "tensor")


def read(*outputs: str) -> Callable[[MStarClient], list[tuple[str, bytes]]]:
    """Work that reads a stream to its end and returns its outputs."""

    def work(client: MStarClient) -> list[tuple[str, bytes]]:
        with client.stream(text="hello there", output_modalities=outputs, reconnect=True, seed=3) as stream:
            chunks = [(type(event).__name__, event.data) for event in stream if isinstance(event, Chunk)]
            assert stream.finish_reason == "stop" and stream.usage is not None and stream.seed == 3
            return chunks

    return work


@pytest.mark.parametrize("outputs", [("text", "audio"), ALL], ids=["lines", "frames"])
@SHARED
async def test_a_stream_that_is_cut_anywhere_is_whole(outputs: tuple[str, ...], api: Api) -> None:
    calm = await in_thread(read(*outputs), api.url)
    assert calm
    for first in (1000, 1500, 4001, 9000):
        with CuttingProxy(api.process.port, [first, 700, 1300, 2048]) as proxy:
            assert await in_thread(read(*outputs), proxy.url) == calm
            assert proxy.opened > 1, "the stream was not cut"
    assert not api.fake.cancels


@SHARED
async def test_the_asynchronous_client_reconnects_as_well(api: Api) -> None:
    calm = await in_thread(read("text", "audio"), api.url)
    with CuttingProxy(api.process.port, [1500]) as proxy:
        async with AsyncMStarClient(proxy.url) as client:
            stream = await client.stream(
                text="hello there", output_modalities=("text", "audio"), reconnect=True, seed=3
            )
            got = [(type(event).__name__, event.data) async for event in stream if isinstance(event, Chunk)]
    assert got == calm


@SHARED
async def test_without_the_option_a_cut_is_an_error(api: Api) -> None:
    def work(client: MStarClient) -> None:
        with pytest.raises(StreamError, match="broke off"):
            list(client.stream(text="hi", output_modalities="audio"))

    with CuttingProxy(api.process.port, [1500]) as proxy:
        await in_thread(work, proxy.url)


@SHARED
async def test_events_that_are_lost_end_the_stream_with_the_reason(api: Api) -> None:
    def work(client: MStarClient) -> None:
        stream = client.stream(text="hi", output_modalities="audio", reconnect=True)
        next(stream)
        asyncio.run_coroutine_threadsafe(lose(), loop).result()
        with pytest.raises(StreamError, match="no events of this request are kept"):
            list(stream)

    async def lose() -> None:
        api.fake.audio(api.fake.requests[-1].handle)
        api.fake.finish(api.fake.requests[-1].handle)
        kept = api.process._service.kept_events if api.process._service is not None else None
        assert kept is not None
        await api.until(lambda: all(log.has_ended for log in kept._logs.values()))
        kept._logs.clear()

    api.fake.script = begin
    loop = asyncio.get_running_loop()
    with CuttingProxy(api.process.port, [6500]) as proxy:
        await in_thread(work, proxy.url)


@SHARED
async def test_leaving_a_stream_that_reconnects_cancels_its_request(api: Api) -> None:
    def work(client: MStarClient) -> None:
        stream: Stream = client.stream(text="hi", output_modalities="audio", reconnect=True)
        with stream:
            next(stream)
        stream.close()

    api.fake.script = begin
    await in_thread(work, api.url)
    await api.fake.until(lambda: bool(api.fake.cancels))
    assert [cancel.why for cancel in api.fake.cancels] == ["by_id"]


def test_the_option_needs_a_stream() -> None:
    with MStarClient("http://localhost:1") as client, pytest.raises(ValueError, match="stream=True"):
        client.generate(text="hi", reconnect=True)


async def test_the_package_of_openai_reads_events_with_ids() -> None:
    async with running(say(b"one", b"two"), model=CHAT) as api:
        await check_openai(api)


async def check_openai(api: Api) -> None:
    """Compare a chat stream with ids with one without."""
    body = {"model": "x", "messages": [{"role": "user", "content": "hello"}], "stream": True, "seed": 3}

    def work() -> tuple[str, str]:
        texts = []
        with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
            for headers in ({}, {"X-Mstar-Detach": "true", "X-Request-ID": "with-ids"}):
                answer = client.chat.completions.create(**body, extra_headers=headers)  # type: ignore[call-overload]
                texts.append("".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices))
        return texts[0], texts[1]

    first, second = await asyncio.to_thread(work)
    assert first == second != ""
    async with httpx.AsyncClient(base_url=api.url) as client:
        kept = (await client.get("/v1/requests/with-ids/events")).text
    events = [part.split("\n") for part in kept.split("\n\n") if part]
    assert [lines[0] for lines in events] == [f"id: {number}" for number in range(1, len(events) + 1)]
    assert json.loads(events[0][1].removeprefix("data: "))["id"] == "chatcmpl-with-ids"
