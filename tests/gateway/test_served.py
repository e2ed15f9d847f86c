"""Four models of four families behind one port, each loaded by its first request, used by the unmodified client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from mstarctl.client import AdminClient
from tests.fakes.ports import free_port

MSTARCTL = Path(sys.executable).with_name("mstarctl")
FILE = """
port: {port}
models:
  llm: {{target: "llm:mini", device: cpu, aliases: [small-chat]}}
  ears: {{target: "whisper:tiny", device: cpu}}
  voice: {{target: "orpheus:tiny", device: cpu}}
  brush: {{target: "bagel:tiny", device: cpu}}
"""


class ServedModels:
    """A running gateway whose models are loaded on demand. url: of its OpenAI routes."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.environment = {**os.environ, "MSTAR_RUNTIME_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1"}
        self.environment.pop("XDG_STATE_HOME", None)
        self.file = folder / "serve.yaml"
        self.file.write_text(FILE.format(port=self.port))

    def mstarctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command against it."""
        return subprocess.run(
            [str(MSTARCTL), *words], env=self.environment, capture_output=True, text=True, timeout=200, check=False
        )

    def usage(self) -> dict[str, Any]:
        """Return the usage by model."""
        items = json.loads(self.mstarctl("usage", "--by", "model", "-o", "json").stdout)["items"]
        return {item["model"]: item for item in items}

    def usage_once(self, is_whole: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the usage once it fulfils a condition; reports take some frames of telemetry."""
        end = time.monotonic() + 200
        while not is_whole(used := self.usage()):
            assert time.monotonic() < end, used
        return used

    def worker(self) -> int:
        """Return the pid of the gateway's worker."""
        socket = Path(self.environment["MSTAR_RUNTIME_DIR"], ".gateways", "gateway", "admin.sock")
        with AdminClient(socket) as admin:
            return int(admin.head()["worker"])

    def states(self) -> dict[str, str]:
        """Return the state of each model."""
        items = json.loads(self.mstarctl("serve", "ls", "-o", "json").stdout)["items"]
        return {item["name"]: item["state"] for item in items}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModels]:
    folder = tmp_path_factory.mktemp("served")
    folder.chmod(0o700)
    gateway = ServedModels(folder)
    started = gateway.mstarctl("serve", str(gateway.file), "-d")
    assert started.returncode == 0, started.stderr
    try:
        yield gateway
    finally:
        gateway.mstarctl("serve", "down", "--grace", "5s")
        left = json.loads(gateway.mstarctl("ps", "-o", "json").stdout)["items"]
        for item in left:
            gateway.mstarctl("down", str(item["name"]), "--now")
    assert left == []  # the gateway ends what it has started


@pytest.fixture
async def client(served: ServedModels) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=served.url, api_key="any", timeout=250, max_retries=0) as opened:
        yield opened


async def chat(client: openai.AsyncOpenAI) -> str:
    """Stream an answer and return its text."""
    stream = await client.chat.completions.create(
        model="small-chat", messages=[{"role": "user", "content": "hello"}], stream=True, max_tokens=8
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def speak(client: openai.AsyncOpenAI) -> bytes:
    """Return speech as a WAV file."""
    extra = {"max_output_tokens": 64}
    answer = await client.audio.speech.create(
        model="voice", voice="tara", input="Hi", response_format="wav", extra_body=extra
    )
    return answer.content


async def draw(client: openai.AsyncOpenAI) -> bytes:
    """Return a picture as a PNG file."""
    answer = await client.images.generate(model="brush", prompt="a disc", n=1)
    return base64.b64decode((answer.data or [])[0].b64_json or "")


async def listen(client: openai.AsyncOpenAI, sound: bytes) -> Any:
    """Return the transcription of a sound, whose form names its model."""
    return await client.audio.transcriptions.create(model="ears", file=("a.wav", io.BytesIO(sound)))


async def test_one_port_serves_all_families(client: openai.AsyncOpenAI, served: ServedModels) -> None:
    listed = {model.id async for model in await client.models.list()}
    assert listed == {"llm", "ears", "voice", "brush"}
    text, sound, picture = await asyncio.gather(chat(client), speak(client), draw(client))
    assert text.strip()
    assert sound[:4] == b"RIFF" and len(sound) > 4000
    assert Image.open(io.BytesIO(picture)).format == "PNG"
    assert isinstance((await listen(client, sound)).text, str)
    states = await asyncio.to_thread(served.states)
    assert set(states.values()) <= {"ready", "idle"}
    with pytest.raises(openai.NotFoundError, match="voice"):
        await client.audio.speech.create(model="voise", voice="tara", input="Hi")
    card = await client.models.retrieve("small-chat")
    assert card.id == "llm" and "/v1/chat/completions" in (card.model_extra or {})["endpoints"]


async def test_usage_is_what_the_deployments_report(client: openai.AsyncOpenAI, served: ServedModels) -> None:
    """Tokens, sound and pictures of each model, though answers pass through the gateway unread."""
    answer = await client.chat.completions.create(
        model="llm", messages=[{"role": "user", "content": "hello"}], max_tokens=8
    )
    assert answer.usage is not None
    await client.audio.transcriptions.create(model="ears", file=("a.wav", io.BytesIO(await speak(client))))
    await draw(client)

    def is_whole(used: dict[str, Any]) -> bool:
        figures = {"llm": "output_tokens", "ears": "audio_in_s", "voice": "audio_out_s", "brush": "images"}
        return all(used.get(model, {}).get(figure) and used[model]["device_s"] for model, figure in figures.items())

    used = await asyncio.to_thread(served.usage_once, is_whole)
    assert used["llm"]["input_tokens"] >= answer.usage.prompt_tokens
    assert used["llm"]["output_tokens"] >= answer.usage.completion_tokens
    assert sum(item["unknown"] for item in used.values()) == 0


async def test_a_killed_gateway_loses_no_usage(client: openai.AsyncOpenAI, served: ServedModels) -> None:
    """The worker dies in the middle of an answer; the next one books what the deployment had generated."""
    nothing = {"requests": 0, "output_tokens": 0, "unknown": 0}
    before = (await asyncio.to_thread(served.usage)).get("llm", nothing)
    stream = await client.chat.completions.create(
        model="llm", messages=[{"role": "user", "content": "count"}], stream=True, max_tokens=500
    )
    await anext(aiter(stream))
    os.kill(await asyncio.to_thread(served.worker), signal.SIGKILL)
    with contextlib.suppress(openai.APIError, httpx.HTTPError):  # the answer may have ended at the same moment
        async for _ in stream:
            pass

    def is_whole(used: dict[str, Any]) -> bool:
        now = used.get("llm", nothing)
        return bool(now["output_tokens"] > before["output_tokens"] and not now["running"])

    after = (await asyncio.to_thread(served.usage_once, is_whole))["llm"]
    assert after["requests"] == before["requests"] + 1 and after["unknown"] == before["unknown"] == 0
