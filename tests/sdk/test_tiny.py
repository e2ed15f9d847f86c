"""One miniature deployment of real processes: both clients, the examples, curl, and the openai packages."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mstar_core import AsyncMStarClient, MStarClient
from mstar_core.client import AudioChunk, BadRequestError
from tests.runtime.deployment import Deployment
from tests.sdk.conftest import EXAMPLES, curl_lines, is_chat, node_modules, told

SURE: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1.0, "ignore_eos": True, "max_output_tokens": 84}
"""Parameters under which the miniature speaks, and says the same on every route."""


@pytest.fixture(scope="module")
def server() -> Iterator[Deployment]:
    with Deployment(max_seq_len=256) as running:  # a short context ends what the miniature babbles
        yield running


def test_whole_and_streamed_sound_are_the_same(server: Deployment) -> None:
    with MStarClient(server.url) as client:
        whole = client.tts("Hello there", voice="leo", noise="off", **SURE)
        with client.stream(
            text="Hello there", output_modalities=("audio",), voice="leo", noise="off", **SURE
        ) as stream:
            pieces = [event.pcm for event in stream if isinstance(event, AudioChunk)]
        assert whole.sample_rate == 24000 and len(whole) > 2048 and len(pieces) > 1
        assert b"".join(pieces) == whole.pcm
        assert (stream.finish_reason, stream.usage is not None) == ("length", True)
        with pytest.raises(BadRequestError, match="nobody") as refused:
            client.tts("Hello", voice="nobody")
        assert refused.value.param == "voice"


async def test_streams_that_are_left_leave_nothing_behind(server: Deployment) -> None:
    async with AsyncMStarClient(server.url) as client:

        async def leave(number: int) -> None:
            async with await client.stream(text=f"line {number}", output_modalities="audio", ignore_eos=True) as stream:
                await anext(stream)

        await asyncio.gather(*(leave(number) for number in range(8)))
        assert len(await client.tts("and on it goes", **SURE)) > 0
    await asyncio.to_thread(server.assert_clean)


def test_the_openai_package_speaks(server: Deployment) -> None:
    call: dict[str, Any] = {"model": "orpheus", "voice": "leo", "input": "Hello there", "response_format": "pcm"}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        whole = client.audio.speech.create(**call, extra_body={**SURE, "noise": "off"}).content
        with client.audio.speech.with_streaming_response.create(
            **call, extra_body={**SURE, "noise": "off", "stream": True}
        ) as answer:
            assert b"".join(answer.iter_bytes()) == whole and len(whole) > 4096
        assert [model.id for model in client.models.list()] == ["orpheus"]


@pytest.mark.parametrize("name", ["speak.py", "speak_stream.py", "speak_many.py", "openai_speech.py"])
def test_the_examples_run(name: str, server: Deployment, tmp_path: Path) -> None:
    said = told([sys.executable, str(EXAMPLES / name), "Hello there", server.url], tmp_path)
    files = sorted(tmp_path.glob("*.wav"))
    assert files and all(file.name in said for file in files)
    for file in files:
        with wave.open(str(file)) as sound:
            assert (sound.getframerate(), sound.getnframes() > 0) == (24000, True)


def test_the_published_openai_package_for_node_speaks(server: Deployment, tmp_path: Path) -> None:
    # An ES module is resolved from where it lies, so the example lies beside the packages for the length of the test.
    (tmp_path / "node_modules").symlink_to(node_modules())
    shutil.copy(EXAMPLES / "openai_speech.mjs", tmp_path)
    said = json.loads(told(["node", "openai_speech.mjs", "Hello there", server.url], tmp_path))
    assert said["models"] == ["orpheus"] and said["refusal"] == "400 invalid_value voice"
    assert said["whole"] == (tmp_path / "node.wav").stat().st_size
    assert said["streamed"] == said["whole"] - 44


@pytest.mark.parametrize("line", [line for line in curl_lines() if not is_chat(line)])
def test_the_curl_commands_of_the_page_run(line: str, server: Deployment, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("runs where curl is installed")
    said = told(["bash", "-c", line.replace("localhost:8000", server.url)], tmp_path)
    if "-o " in line:
        (file,) = tmp_path.iterdir()
        assert file.read_bytes()[:4] == b"RIFF"
    elif "/generate" in line:
        assert {json.loads(item)["modality"] for item in said.splitlines() if item} == {"audio"}
    else:
        assert "error" not in json.loads(said)
