"""The asynchronous client against a real api: the same answers, events, errors and ends as the synchronous one."""

from __future__ import annotations

import asyncio
import gc
import inspect

import httpx
import pytest

from mstar_core.client import (
    AsyncMStarClient,
    AudioChunk,
    BadRequestError,
    ErrorEvent,
    MStarClient,
    StreamError,
    TextChunk,
    UnavailableError,
)
from tests.api.conftest import Api
from tests.fakes import media
from tests.fakes.any_model import PIXELS, SOUND, WORDS, png
from tests.fakes.conductor import begin
from tests.sdk.conftest import SHARED


def test_both_clients_have_the_same_names_and_parameters() -> None:
    def shape(client: type) -> dict[str, list[str]]:
        calls = inspect.getmembers(client, inspect.isfunction)
        return {name: list(inspect.signature(call).parameters) for name, call in calls if not name.startswith("_")}

    assert shape(MStarClient) == shape(AsyncMStarClient)


@SHARED
async def test_whole_answers_and_shorter_calls(api: Api) -> None:
    async with AsyncMStarClient(api.url) as client:
        got = await client.generate(text="hi", images=png(PIXELS), seed=2)
        assert (got.text, got.seed, got.finish_reason) == (WORDS, 2, "stop")
        assert await client.generate_image("a cat") == await client.edit_image("b", png(PIXELS)) == png(PIXELS)
        assert (await client.tts("hi", voice="leo")).pcm == SOUND.tobytes()
        assert (await client.act(png(PIXELS), "go", [0.5])).shape == (3, 2)
        for latents in (
            await client.encode(media.video()),
            await client.rollout(media.video(), [[0.0]], [[0.0]]),
            await client.plan(png(PIXELS), png(PIXELS), [0.0]),
        ):
            assert latents.tensors[0].shape == (2, 3, 4)
        assert (await client.health(), await client.ready()) == (True, True)
        assert [model.id for model in await client.models()] == ["fake"]
        with pytest.raises(BadRequestError) as refused:
            await client.tts("hi", voice="nobody")
        assert refused.value.param == "voice"


@SHARED
async def test_many_streams_share_one_client(api: Api) -> None:
    async with AsyncMStarClient(api.url) as client:

        async def one() -> bytes:
            async with await client.stream(text="hi", output_modalities="audio") as stream:
                pcm = b"".join([event.data async for event in stream if isinstance(event, AudioChunk)])
            assert stream.finish_reason == "stop" and stream.usage is not None
            return pcm

        assert set(await asyncio.gather(*(one() for _ in range(16)))) == {SOUND.tobytes()}


@SHARED
async def test_chat_streams_text(api: Api) -> None:
    async with AsyncMStarClient(api.url) as client:
        stream = await client.chat("hi", stream=True)
        assert "".join([event.text async for event in stream if isinstance(event, TextChunk)]) == WORDS


@pytest.mark.parametrize("how", ["close", "break", "drop", "unread", "task"])
@SHARED
async def test_leaving_a_stream_cancels_its_request(how: str, api: Api) -> None:
    api.fake.script = begin
    async with AsyncMStarClient(api.url) as client:
        stream = await client.stream(text="hi", output_modalities="audio")
        if how != "unread":
            assert isinstance(await anext(stream), AudioChunk)
        match how:
            case "close":
                await stream.close()
                assert [event async for event in stream] == []
            case "break":
                async with stream:
                    pass
            case "drop" | "unread":
                del stream
                gc.collect()
            case "task":
                waiting = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                await stream.close()
        await api.fake.until(lambda: bool(api.fake.cancels))
        await api.until(lambda: api.service_is_clean)


@SHARED
async def test_cancel_by_id_and_failures_end_the_stream(api: Api) -> None:
    api.fake.script = begin
    async with AsyncMStarClient(api.url) as client:
        stream = await client.stream(text="hi", output_modalities="audio", request_id="mine")
        await anext(stream)
        assert await stream.cancel() is True
        with pytest.raises(StreamError, match="cancelled by its id"):
            await anext(stream)
        assert [event async for event in stream] == []
        assert await client.cancel("mine") is True and await client.cancel("other") is False
        stream = await client.stream(text="hi", output_modalities="audio", on_error="event")
        await anext(stream)
        api.fake.fail(api.fake.requests[1].handle)
        error = await anext(stream)
        assert isinstance(error, ErrorEvent) and error.code == "engine_error"


async def test_a_failed_connection_is_tried_again_and_a_session_of_the_caller_stays_open() -> None:
    tries: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        tries.append(request)
        if len(tries) < 3:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"object": "list", "data": []})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as session:
        client = AsyncMStarClient("http://api", session=session, retries=1)
        with pytest.raises(UnavailableError, match="nothing answers"):
            await client.models()
        assert await client.models() == [] and len(tries) == 3
        await client.close()
        assert not session.is_closed
    with pytest.raises(TypeError, match=r"httpx\.AsyncClient, not Client"):
        AsyncMStarClient(session=httpx.Client())
