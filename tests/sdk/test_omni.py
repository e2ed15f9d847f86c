"""Chat, images and transcription: the clients, the openai packages and curl against a model with every route."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from mstar_core.client import AsyncMStarClient, GenerateResult, MStarClient
from tests.api.conftest import Api, running
from tests.fakes import media
from tests.fakes.conductor import FakeDeployment, echo
from tests.fakes.omni_model import SPEC
from tests.sdk.conftest import EXAMPLES, SHARED, curl_lines, is_chat, node_modules, told

HI: list[Any] = [{"role": "user", "content": "hi"}]
ANSWER = "<user>hi<assistant>"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def omni_api() -> AsyncIterator[Api]:
    async with running(echo, model=SPEC) as started:
        yield started


@pytest.fixture
def omni(omni_api: Api) -> Api:
    """The module's api, with nothing noted of what came before."""
    omni_api.fake.received.clear()
    omni_api.fake.script = echo
    return omni_api


@SHARED
async def test_our_clients_chat_paint_and_transcribe(omni: Api) -> None:
    def work() -> tuple[str, bytes, bytes, str]:
        with MStarClient(omni.url) as client:
            chat = client.chat("see ", images=media.image(8, 6), max_output_tokens=30)
            assert isinstance(chat, GenerateResult)
            watched = client.chat("watch ", video=media.video())
            assert isinstance(watched, GenerateResult) and watched.text == "[video 2x32x16]watch "
            first = client.generate_image("a cat", width=24)
            second = client.edit_image("bluer", first)
            return chat.text, first, second, client.transcribe(media.wav(0.1), language="en")

    text, first, second, words = await asyncio.to_thread(work)
    assert text == "[image 8x6]see " and first[:8] == second[:8] == PNG
    assert "[audio 1600]" in words and "Write down the" in words
    async with AsyncMStarClient(omni.url) as client:
        assert await client.transcribe(media.wav(0.1), language="en") == words


def chunks_of(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


@SHARED
async def test_the_synchronous_openai_package_chats_paints_and_transcribes(omni: Api) -> None:
    def work() -> None:
        with openai.OpenAI(base_url=f"{omni.url}/v1", api_key="any", max_retries=0) as client:
            whole = client.chat.completions.create(model="fake", messages=HI, n=2, seed=3)
            assert [choice.message.content for choice in whole.choices] == [ANSWER] * 2
            with client.chat.completions.create(model="fake", messages=HI, stream=True) as stream:
                assert chunks_of(stream) == ANSWER
            with client.chat.completions.with_streaming_response.create(
                model="fake", messages=HI, stream=True
            ) as answer:
                lines = [line for line in answer.iter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            output = client.images.generate(model="fake", prompt="a cat", n=2, size="16x8")
            assert output.data is not None and len(output.data) == 2
            png = base64.b64decode(output.data[0].b64_json or "")
            edited = client.images.edit(model="fake", image=("a.png", png), prompt="bluer")
            assert edited.data is not None and base64.b64decode(edited.data[0].b64_json or "")[:8] == PNG
            heard = client.audio.transcriptions.create(model="fake", file=("a.wav", media.wav(0.1)), language="en")
            assert "[audio 1600]" in heard.text

    await asyncio.to_thread(work)


@SHARED
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_leaving_a_chat_stream_cancels_it(kind: str, omni: Api) -> None:
    def start(fake: FakeDeployment, request: Any) -> None:
        fake.text(request.handle, b"a")

    def sync() -> None:
        with openai.OpenAI(base_url=f"{omni.url}/v1", api_key="any") as client:
            with client.chat.completions.create(model="fake", messages=HI, stream=True) as stream:
                next(iter(stream))

    omni.fake.script = start
    if kind == "sync":
        await asyncio.to_thread(sync)
    else:
        async with openai.AsyncOpenAI(base_url=f"{omni.url}/v1", api_key="any") as client:
            async with await client.chat.completions.create(model="fake", messages=HI, stream=True) as stream:
                await anext(aiter(stream))
    await omni.fake.until(lambda: bool(omni.fake.cancels))
    await omni.until(lambda: omni.service_is_clean)


@SHARED
async def test_a_chat_stream_that_fails_raises_and_never_stops_quietly(omni: Api) -> None:
    def start(fake: FakeDeployment, request: Any) -> None:
        fake.text(request.handle, b"a")

    omni.fake.script = start
    async with openai.AsyncOpenAI(base_url=f"{omni.url}/v1", api_key="any") as client:
        stream = await client.chat.completions.create(model="fake", messages=HI, stream=True)
        pieces = aiter(stream)
        while not (await anext(pieces)).choices[0].delta.content:
            pass
        omni.fake.fail(omni.fake.requests[0].handle)
        with pytest.raises(openai.APIError) as broken:
            async for _ in pieces:
                pass
    assert broken.value.code == "engine_error"


@SHARED
async def test_the_examples_run(omni: Api, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(media.image(8, 6))

    def run(*words: str) -> str:
        return told([sys.executable, str(EXAMPLES / words[0]), *words[1:], omni.url], tmp_path)

    said = await asyncio.to_thread(run, "chat.py", "What is this?", "a.png")
    assert said.startswith("[image 8x6]What is this?\n[stop; ")
    answered = await asyncio.to_thread(run, "converse.py", "What is this?", "a.png")
    assert answered == "<user>[image 8x6]What is this?<assistant>\nwrote answer.wav\n"
    assert (tmp_path / "answer.wav").stat().st_size >= 44
    await asyncio.to_thread(run, "image.py", "a red bicycle", "make it blue")
    assert (tmp_path / "first.png").read_bytes()[:8] == (tmp_path / "second.png").read_bytes()[:8] == PNG


@SHARED
async def test_the_published_openai_package_for_node_chats(omni: Api, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(node_modules())
    shutil.copy(EXAMPLES / "openai_chat.mjs", tmp_path)
    said = json.loads(await asyncio.to_thread(told, ["node", "openai_chat.mjs", "Hello", omni.url], tmp_path))
    text = "<user>Hello<assistant>"
    assert said == {"streamed": text, "whole": text, "reason": "stop", "tokens": 2 * len(text)}


@SHARED
@pytest.mark.parametrize("line", [line for line in curl_lines() if is_chat(line)])
async def test_the_curl_commands_of_the_page_run(line: str, omni: Api, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("runs where curl is installed")
    typed = line.replace("localhost:8000", omni.url)
    said = await asyncio.to_thread(told, ["bash", "-c", typed], tmp_path)
    assert said.endswith("data: [DONE]\n\n") if '"stream": true' in line else "error" not in json.loads(said)
