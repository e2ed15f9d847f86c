"""The published openai package, unmodified, against a real api: whole, streamed, events, errors, closing."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from collections.abc import Callable
from typing import Any, TypeVar

import httpx2
import openai
import pytest

from tests.api.conftest import Api
from tests.fakes.any_model import SOUND
from tests.fakes.conductor import begin
from tests.fakes.speech_model import RATE
from tests.sdk.conftest import SHARED, any_api

T = TypeVar("T")
SPEECH: dict[str, Any] = {"model": "fake", "voice": "tara", "input": "hi"}


async def sync(api: Api, work: Callable[[openai.OpenAI], T]) -> T:
    """Run `work` with the synchronous client on a thread."""

    def run() -> T:
        with openai.OpenAI(base_url=f"{api.url}/v1", api_key="any", max_retries=0) as client:
            return work(client)

    return await asyncio.to_thread(run)


def asynchronous(api: Api, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="any", **{"max_retries": 0, **options})


@SHARED
async def test_a_whole_file_comes_back_to_both_clients(api: Api) -> None:
    body = await sync(api, lambda c: c.audio.speech.create(**SPEECH, response_format="wav").content)
    with wave.open(io.BytesIO(body)) as sound:
        assert (sound.getframerate(), sound.readframes(sound.getnframes())) == (RATE, SOUND.tobytes())
    async with asynchronous(api) as client:
        assert (await client.audio.speech.create(**SPEECH, response_format="pcm")).content == SOUND.tobytes()
        raw = await client.audio.speech.with_raw_response.create(**SPEECH, extra_headers={"X-Request-ID": "mine"})
        assert (raw.headers["X-Request-ID"], raw.headers["X-Sample-Rate"]) == ("mine", str(RATE))


@SHARED
async def test_streamed_sound_arrives_while_the_request_runs(api: Api) -> None:
    """The second piece is made only once the first was read: a client that waits for the end would wait for good."""
    first = SOUND[:2048].tobytes()
    call = {**SPEECH, "response_format": "pcm", "extra_body": {"stream": True, "seed": 3}}

    def end(api: Api) -> None:
        handle = api.fake.requests[-1].handle
        api.fake.output(handle, "audio", SOUND[2048:])
        api.fake.finish(handle)

    def start(fake: Any, request: Any) -> None:
        fake.output(request.handle, "audio", SOUND[:2048])

    def work(client: openai.OpenAI) -> bytes:
        with client.audio.speech.with_streaming_response.create(**call) as answer:
            pieces = answer.iter_bytes()
            got = next(pieces)
            assert got == first[: len(got)]
            loop.call_soon_threadsafe(end, api)
            return got + b"".join(pieces)

    loop = asyncio.get_running_loop()
    api.fake.script = start
    assert await sync(api, work) == SOUND.tobytes()
    async with (
        asynchronous(api) as client,
        client.audio.speech.with_streaming_response.create(**call) as answer,
    ):
        pieces = answer.iter_bytes()
        got = await anext(pieces)
        end(api)
        assert got + b"".join([piece async for piece in pieces]) == SOUND.tobytes()
    assert [request.seed for request in api.fake.requests] == [3, 3]


@SHARED
async def test_events_are_read_line_by_line(api: Api) -> None:
    def work(client: openai.OpenAI) -> list[dict[str, Any]]:
        call = {**SPEECH, "response_format": "pcm", "stream_format": "sse"}
        with client.audio.speech.with_streaming_response.create(**call) as answer:
            return [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]

    *deltas, done = await sync(api, work)
    assert b"".join(base64.b64decode(event["audio"]) for event in deltas) == SOUND.tobytes()
    assert done["type"] == "speech.audio.done" and done["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("kind", ["sync", "async"])
@SHARED
async def test_closing_a_stream_cancels(kind: str, api: Api) -> None:
    call = {**SPEECH, "response_format": "pcm", "extra_body": {"stream": True}}

    def work(client: openai.OpenAI) -> int:
        with client.audio.speech.with_streaming_response.create(**call) as answer:
            return len(next(answer.iter_bytes()))

    api.fake.script = begin
    if kind == "sync":
        assert await sync(api, work) > 0
    else:
        async with (
            asynchronous(api) as client,
            client.audio.speech.with_streaming_response.create(**call) as answer,
        ):
            assert len(await anext(answer.iter_bytes())) > 0
    await api.fake.until(lambda: bool(api.fake.cancels))
    await api.until(lambda: api.service_is_clean)


@SHARED
async def test_a_stream_that_fails_is_cut_and_never_looks_whole(api: Api) -> None:
    call = {**SPEECH, "response_format": "pcm", "extra_body": {"stream": True}}
    broken = (openai.APIConnectionError, httpx2.TransportError)
    api.fake.script = begin
    async with asynchronous(api) as client:
        async with client.audio.speech.with_streaming_response.create(**call) as answer:
            pieces = answer.iter_bytes()
            await anext(pieces)
            api.fake.fail(api.fake.requests[0].handle)
            with pytest.raises(broken):
                async for _ in pieces:
                    pass
        # the cause is available afterwards
        state = await api.client.get(f"/v1/requests/{answer.headers['X-Request-ID']}")
        assert state.json()["error"]["code"] == "engine_error"


@SHARED
async def test_refusals_are_the_packages_own_errors(api: Api) -> None:
    async with any_api(begin, max_concurrent_requests=1, max_queue=0) as narrow, asynchronous(narrow) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.audio.speech.create(**{**SPEECH, "voice": "nobody"})
        assert (refused.value.param, refused.value.code, bool(refused.value.request_id)) == (
            "voice",
            "invalid_value",
            True,
        )
        with pytest.raises(openai.NotFoundError) as absent:
            await client.models.retrieve("nobody")
        assert absent.value.code == "model_not_found"
        async with client.audio.speech.with_streaming_response.create(
            **SPEECH, extra_body={"stream": True}, extra_headers={"X-Request-ID": "mine"}
        ):
            with pytest.raises(openai.RateLimitError) as full:
                await client.audio.speech.create(**SPEECH)
            assert full.value.code == "queue_full" and 1 <= int(full.value.response.headers["Retry-After"]) <= 60
    async with any_api(begin, api_keys=("secret",)) as locked, asynchronous(locked) as client:
        with pytest.raises(openai.AuthenticationError) as unknown:
            await client.audio.speech.create(**SPEECH)
        assert unknown.value.code == "invalid_api_key"
    api.fake.script = begin
    async with asynchronous(api) as client:
        async with client.audio.speech.with_streaming_response.create(
            **SPEECH, extra_body={"stream": True}, extra_headers={"X-Request-ID": "mine"}
        ):
            with pytest.raises(openai.ConflictError):
                await client.audio.speech.create(**SPEECH, extra_headers={"X-Request-ID": "mine"})


@SHARED
async def test_models_are_listed_and_fetched(api: Api) -> None:
    assert await sync(api, lambda c: [model.id for model in c.models.list()]) == ["fake"]
    async with asynchronous(api) as client:
        assert (await client.models.retrieve("fake_any")).owned_by == "mstar"
