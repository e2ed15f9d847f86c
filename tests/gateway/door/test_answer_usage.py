"""Usage that answers name: of deployments elsewhere, whose reports the gateway cannot read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mstar_core.gateway.door.answer_usage import TAIL_BYTES, SessionUsage, UsageReader, last_usage
from mstar_core.gateway.parts import AnsweredUsage
from mstar_core.gateway.serve_file import ServeFile, TenantSpec
from mstar_core.gateway.tenants.accounts.tenant_file import TenantFile
from mstar_core.gateway.tenants.gate import TenantGate
from mstar_core.gateway.tenants.usage import usage
from tests.fakes.deployments import FakeDeployment
from tests.fakes.gateway import Gateway, Opened
from tests.gateway.door.test_tenants import Clock

CHAT_USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 7,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 4, "text_tokens": 11},
}
RESPONSE_USAGE = {"input_tokens": 11, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 4}}
KNOWN = AnsweredUsage(input_tokens=11, cached_tokens=4, output_tokens=7)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chat_events(*, has_usage: bool) -> list[bytes]:
    """Return a chat stream of three words."""
    deltas: list[dict[str, Any]] = [{"role": "assistant"}, *({"content": word} for word in "abc"), {}]
    events = [event(choices=[{"index": 0, "delta": delta}], usage=None) for delta in deltas]
    return [*events, *([event(choices=[], usage=CHAT_USAGE)] if has_usage else []), b"data: [DONE]\n\n"]


def read(pieces: list[bytes], *, is_stream: bool) -> AnsweredUsage | None:
    reader = UsageReader(is_stream)
    for piece in pieces:
        reader.feed(piece)
    return reader.usage()


@pytest.mark.parametrize(
    ("pieces", "is_stream"),
    [
        ([json.dumps({"choices": [], "usage": CHAT_USAGE}).encode()], False),
        ([json.dumps({"output": ["x" * 4096] * 40, "usage": RESPONSE_USAGE}).encode()], False),
        (chat_events(has_usage=True), True),
        ([event(type="response.completed", response={"output": [], "usage": RESPONSE_USAGE})], True),
    ],
    ids=["chat", "long response", "chat stream", "response stream"],
)
def test_a_usage_object_is_found_however_its_bytes_are_cut(pieces: list[bytes], is_stream: bool) -> None:
    whole = b"".join(pieces)
    for size in (1, 7, 1000, len(whole)):
        cut = [whole[start : start + size] for start in range(0, len(whole), size)]
        assert read(cut, is_stream=is_stream) == KNOWN


def test_a_native_answer_names_sound_and_images() -> None:
    body = json.dumps({"metadata": {"usage": {**CHAT_USAGE, "audio_seconds": 1.5, "images": 2}}}).encode()
    assert read([body], is_stream=False) == AnsweredUsage(
        input_tokens=11, cached_tokens=4, output_tokens=7, audio_out_s=1.5, images=2
    )
    heard = json.dumps({"text": "hi", "usage": {"type": "duration", "seconds": 3}}).encode()
    assert read([heard], is_stream=False) == AnsweredUsage(audio_in_s=3.0)


def test_the_text_of_a_client_or_model_is_no_usage() -> None:
    words = json.dumps({"choices": [{"message": {"content": '"usage": {"completion_tokens": 9}'}}]}).encode()
    assert last_usage(words) is None and read([words], is_stream=False) is None
    wrong = json.dumps({"usage": {"prompt_tokens": "many", "completion_tokens": -5, "images": True}}).encode()
    assert last_usage(wrong) == AnsweredUsage()


def test_a_stream_without_usage_counts_its_pieces_of_text() -> None:
    assert read(chat_events(has_usage=False), is_stream=True) == AnsweredUsage(output_tokens=3)
    spoken = [event(type="response.output_text.delta", delta="word") for _ in range(4)]
    assert read(spoken, is_stream=True) == AnsweredUsage(output_tokens=4)
    assert read([event(text="a"), event(text="")], is_stream=True) == AnsweredUsage(output_tokens=1)
    assert read([b"RIFF" + bytes(100)], is_stream=False) is None


def test_the_kept_end_of_an_answer_is_bounded() -> None:
    reader = UsageReader(is_stream=False)
    for _ in range(100):
        reader.feed(bytes(5000))
    reader.feed(b'{"usage": {"input_tokens": 11, "output_tokens": 7}}')
    assert reader.usage() == AnsweredUsage(input_tokens=11, output_tokens=7)
    assert reader._size <= TAIL_BYTES + 5000


def test_the_responses_of_a_session_add_up() -> None:
    reader = SessionUsage()
    done = json.dumps({"type": "response.done", "response": {"usage": RESPONSE_USAGE}})
    assert [reader.feed(text) for text in (done, '{"type": "response.created"}', done)] == [True, False, True]
    assert reader.total == KNOWN.plus(KNOWN)


class Elsewhere:
    """A gateway with tenant `acme` in front of a deployment of another host, which answers `pieces`."""

    def __init__(self, gateway: Gateway, folder: Path, fake: FakeDeployment) -> None:
        self.gateway, self.folder, self.fake = gateway, folder, fake
        self.headers = {"Authorization": f"Bearer {TenantFile(folder).new_key('acme', 0.0, is_known=True)}"}

    async def used(self, requests: int) -> dict[str, Any]:
        """Return the usage once so many requests have ended."""
        async with asyncio.timeout(60):
            while True:
                items = await asyncio.to_thread(usage, self.folder, by=("tenant",))
                if items and items[0]["requests"] == requests and not items[0]["running"]:
                    return items[0]
                await asyncio.sleep(0.02)


@pytest.fixture
async def elsewhere(opened: Opened, tmp_path: Path) -> AsyncIterator[Elsewhere]:
    tenants = {"acme": TenantSpec(name="acme", tokens_per_day=1000)}
    gate = TenantGate(ServeFile(tenants=tenants), tmp_path, clock=Clock(), socket_of=lambda name: tmp_path / name)
    await gate.start()
    fake = FakeDeployment("far", is_local=False)
    yield Elsewhere(await opened(fake, gate=gate, tenants=tenants), tmp_path, fake)
    await gate.close()


async def test_a_tenant_is_charged_by_the_answer_of_a_deployment_elsewhere(elsewhere: Elsewhere) -> None:
    sent = b"".join(chat_events(has_usage=True))

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(sent[:300])
        await response.write(sent[300:])
        await response.write_eof()
        return response

    elsewhere.fake.handler = answer
    path = f"{elsewhere.gateway.url}/v1/chat/completions"
    body = {"model": "far", "stream": True, "max_tokens": 900}
    async with elsewhere.gateway.session.post(path, json=body, headers=elsewhere.headers) as response:
        assert await response.read() == sent
        assert response.headers["x-ratelimit-remaining-tokens"] == "100"
    used = await elsewhere.used(1)
    assert (used["input_tokens"], used["cached_tokens"], used["output_tokens"], used["unknown"]) == (11, 4, 7, 0)
    async with elsewhere.gateway.session.post(path, json=body, headers=elsewhere.headers) as response:
        assert response.headers["x-ratelimit-remaining-tokens"] == "82", "18 are used, and 900 reserved again"


async def test_a_client_that_leaves_is_charged_what_it_got(elsewhere: Elsewhere) -> None:
    events = chat_events(has_usage=False)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in events[:3]:
            await response.write(piece)
        await asyncio.Event().wait()
        return response

    elsewhere.fake.handler = answer
    path = f"{elsewhere.gateway.url}/v1/chat/completions"
    async with elsewhere.gateway.session.post(path, json={"model": "far"}, headers=elsewhere.headers) as response:
        got = b""
        while got.count(b"data: ") < 3:
            got += await response.content.readany()
    await asyncio.wait_for(elsewhere.fake.left.wait(), 60)
    used = await elsewhere.used(1)
    assert (used["output_tokens"], used["unknown"]) == (2, 0)


async def test_a_session_elsewhere_is_charged_for_each_response(elsewhere: Elsewhere) -> None:
    done = json.dumps({"type": "response.done", "response": {"usage": RESPONSE_USAGE}})

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        upgraded = web.WebSocketResponse()
        await upgraded.prepare(request)
        for _ in range(2):
            await upgraded.send_str(done)
        await upgraded.close()
        return upgraded

    elsewhere.fake.handler = answer
    url = f"{elsewhere.gateway.url}/v1/realtime?model=far"
    async with elsewhere.gateway.session.ws_connect(url, headers=elsewhere.headers) as client:
        assert [message.data async for message in client] == [done, done]
    used = await elsewhere.used(1)
    assert (used["input_tokens"], used["output_tokens"]) == (22, 14)
