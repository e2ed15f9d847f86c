"""Forwarded streams: bytes and headers pass untouched, backpressure, cancellation, and what is tried again."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from mstar_core.errors import MstarError, Unavailable
from mstar_core.gateway.parts import RequestFacts
from tests.fakes.deployments import FakeDeployment
from tests.fakes.gateway import Opened
from tests.fakes.open_gate import OpenGate, OpenPermit

CHAT = {"model": "llm", "messages": [{"role": "user", "content": "hello"}], "stream": True}


def streaming(
    *pieces: bytes, gate: asyncio.Event | None = None, headers: dict[str, str] | None = None
) -> FakeDeployment:
    """Return a deployment that sends pieces. gate: awaited after the first."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.content.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **(headers or {})})
        await response.prepare(request)
        for number, piece in enumerate(pieces):
            if number == 1 and gate is not None:
                await gate.wait()
            await response.write(piece)
        await response.write_eof()
        return response

    return FakeDeployment("llm", handler=answer)


async def test_a_piece_reaches_the_client_before_the_next_one_exists(opened: Opened) -> None:
    gate = asyncio.Event()
    gateway = await opened(streaming(b"data: 1\n\n", b"data: 2\n\n", gate=gate))
    async with gateway.session.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        gate.set()
        assert await response.content.read() == b"data: 2\n\n"


class LatePermit(OpenPermit):
    """A permit whose request is written down late, or not at all. written: error or None, once it is known."""

    def __init__(self, known: asyncio.Future[MstarError | None]) -> None:
        super().__init__()
        self.known = known

    async def written(self) -> None:
        """Wait until the test says how it went."""
        if error := await self.known:
            raise error


class LateGate(OpenGate):
    """A gate that admits at once."""

    def __init__(self, known: asyncio.Future[MstarError | None]) -> None:
        super().__init__()
        self._late = LatePermit(known)

    async def admit(self, facts: RequestFacts) -> OpenPermit:
        """Return the late permit."""
        return self._late


@pytest.mark.parametrize(("error", "status"), [(None, 200), (Unavailable("the store is full"), 503)])
async def test_an_answer_begins_once_its_request_is_written_down(
    opened: Opened, error: MstarError | None, status: int
) -> None:
    known: asyncio.Future[MstarError | None] = asyncio.get_running_loop().create_future()
    begun = asyncio.Event()
    fake = streaming(b"data: 1\n\n")
    handler = fake.handler
    assert handler is not None

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        begun.set()
        return await handler(request)

    fake.handler = answer
    gateway = await opened(fake, gate=LateGate(known))
    asked = asyncio.create_task(gateway.text("POST", "/v1/chat/completions", json=CHAT))
    async with asyncio.timeout(60):
        await begun.wait()
        done, _ = await asyncio.wait((asked,), timeout=0.3)
        assert not done, "the deployment has begun, and the client waits for the store"
        known.set_result(error)
        got, text = await asked
    assert got == status and ("data: 1" in text) is (error is None)


async def test_headers_of_one_hop_are_removed_and_others_pass(opened: Opened) -> None:
    fake = FakeDeployment("llm")
    gateway = await opened(fake)
    headers = {"Connection": "X-Hop", "X-Hop": "1", "TE": "trailers", "X-Custom": "a", "X-Request-ID": "mine"}
    async with gateway.session.post(f"{gateway.url}/generate", data={"text": "a"}, headers=headers) as response:
        assert response.status == 200
    seen = fake.received[0].headers
    assert seen["X-Custom"] == "a" and seen["X-Request-ID"] == "mine"
    assert "X-Hop" not in seen and "TE" not in seen
    assert seen["Host"] == gateway.url.removeprefix("http://")


async def test_an_encoded_answer_is_not_decoded(opened: Opened) -> None:
    encoded = {"Content-Encoding": "gzip", "X-Mstar-Warnings": "w"}
    gateway = await opened(streaming(b"\x1f\x8b-not-gzip", headers=encoded))
    async with gateway.session.post(f"{gateway.url}/generate", json={}) as response:
        assert await response.content.read() == b"\x1f\x8b-not-gzip"
        assert response.headers["Content-Encoding"] == "gzip" and response.headers["X-Mstar-Warnings"] == "w"


async def test_a_client_that_leaves_closes_the_request_at_the_deployment(opened: Opened) -> None:
    fake = streaming(b"data: 1\n\n", b"data: 2\n\n", gate=asyncio.Event())
    gateway = await opened(fake)
    response = await gateway.session.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
    await response.content.readany()
    assert gateway.fleet.held["llm"] == 1
    response.close()
    await asyncio.wait_for(fake.left.wait(), 60)
    await asyncio.wait_for(gateway.door.idle.wait(), 60)
    assert gateway.fleet.held["llm"] == 0


async def test_a_client_that_does_not_read_stops_the_deployment(opened: Opened) -> None:
    sent = 0
    is_stopped = asyncio.Event()

    async def flood(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1024):
            write = asyncio.ensure_future(response.write(b"x" * (1 << 18)))
            done, _ = await asyncio.wait({write}, timeout=2.0)
            if not done:
                is_stopped.set()
            await write
            sent += 1 << 18
        await response.write_eof()
        return response

    gateway = await opened(FakeDeployment("llm", handler=flood))
    response = await gateway.session.post(f"{gateway.url}/generate", json={})
    await asyncio.wait_for(is_stopped.wait(), 60)
    assert sent < 64 << 20
    total = 0
    async for piece in response.content.iter_any():
        total += len(piece)
    assert total == 256 << 20


async def test_an_answer_that_breaks_off_does_not_end_well(opened: Opened) -> None:
    async def breaks(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begin")
        assert request.transport is not None
        request.transport.abort()
        return response

    first, second = FakeDeployment("llm", name="a", handler=breaks), FakeDeployment("llm", name="b", handler=breaks)
    gateway = await opened(first, second)
    with pytest.raises(aiohttp.ClientError):
        async with gateway.session.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as response:
            await response.content.read()
    assert "mstar_gateway_broken_streams_total 1.0" in (await gateway.text("GET", "/metrics"))[1]


async def test_a_refused_connection_is_tried_at_another_replica(opened: Opened) -> None:
    gone, there = FakeDeployment("llm", name="a"), FakeDeployment("llm", name="b")
    gateway = await opened(gone, there)
    await gone.close()
    status, answer = await gateway.json("POST", "/v1/chat/completions", json=CHAT)
    assert (status, answer["by"]) == (200, "b")


async def test_503_is_tried_at_another_replica_and_returned_by_the_last(opened: Opened) -> None:
    async def draining(request: web.BaseRequest) -> web.StreamResponse:
        await request.content.read()
        return web.json_response({"error": {"code": "draining"}}, status=503, headers={"Retry-After": "30"})

    full, there = FakeDeployment("llm", name="a", handler=draining), FakeDeployment("llm", name="b")
    gateway = await opened(full, there)
    assert (await gateway.json("POST", "/v1/chat/completions", json=CHAT))[1]["by"] == "b"
    await there.close()
    there.handler = draining
    await there.start()
    async with gateway.session.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as response:
        assert response.status == 503 and response.headers["Retry-After"] == "30"
        assert (await response.json())["error"]["code"] == "draining"


async def test_a_body_that_is_partly_sent_is_not_sent_again(opened: Opened) -> None:
    seen: list[str] = []

    def refusing(name: str) -> FakeDeployment:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            seen.append(name)
            await request.content.read()
            return web.json_response({}, status=503)

        return FakeDeployment("llm", name=name, handler=answer)

    gateway = await opened(refusing("a"), refusing("b"))
    body = json.dumps({**CHAT, "pad": "x" * 200_000})
    status, _ = await gateway.text(
        "POST", "/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
    )
    assert status == 503 and len(seen) == 1


async def test_a_connection_that_ends_before_an_answer_is_not_tried_again(opened: Opened) -> None:
    seen: list[str] = []

    def dying(name: str) -> FakeDeployment:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            seen.append(name)
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        return FakeDeployment("llm", name=name, handler=answer)

    gateway = await opened(dying("a"), dying("b"))
    status, answer = await gateway.json("POST", "/v1/chat/completions", json=CHAT)
    assert (status, answer["error"]["code"]) == (502, "upstream_lost")
    assert len(seen) == 1
