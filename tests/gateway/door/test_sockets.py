"""WebSockets through the gateway."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import WSMsgType, web

from tests.fakes.deployments import FakeDeployment
from tests.fakes.gateway import Opened


def echoing(model: str) -> FakeDeployment:
    """Return a deployment that sends back each message, and closes with 4001 after `bye`."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if "Upgrade" not in request.headers:
            return web.json_response({})
        socket = web.WebSocketResponse(protocols=("realtime",))
        await socket.prepare(request)
        await socket.send_str(f"{model} {request.raw_path}")
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                await socket.send_bytes(message.data)
            elif message.data == "bye":
                await socket.close(code=4001, message=b"done")
            else:
                await socket.send_str(message.data)
        return socket

    return FakeDeployment(model, handler=answer)


async def test_messages_protocol_and_close_code_pass(opened: Opened) -> None:
    gateway = await opened(echoing("omni"), echoing("llm"))
    url = f"{gateway.url}/v1/realtime?model=omni"
    async with gateway.session.ws_connect(url, protocols=("realtime", "other")) as socket:
        assert socket.protocol == "realtime"
        assert (await socket.receive_str()) == "omni /v1/realtime?model=omni"
        await socket.send_str("hello")
        assert await socket.receive_str() == "hello"
        await socket.send_bytes(b"\x00" * 100_000)
        assert len(await socket.receive_bytes()) == 100_000
        await socket.send_str("bye")
        closed = await socket.receive()
        assert (closed.type, closed.data, closed.extra) == (WSMsgType.CLOSE, 4001, "done")


async def test_a_client_that_leaves_ends_the_socket_at_the_deployment(opened: Opened) -> None:
    gateway = await opened(echoing("omni"))
    socket = await gateway.session.ws_connect(f"{gateway.url}/v1/realtime")
    await socket.receive_str()
    assert gateway.fleet.held["omni"] == 1
    await socket.close()
    await asyncio.wait_for(gateway.door.idle.wait(), 60)
    assert gateway.fleet.held["omni"] == 0


async def test_a_refused_handshake_keeps_its_status(opened: Opened) -> None:
    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({}, status=429)

    gateway = await opened(FakeDeployment("omni", handler=refuse))
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await gateway.session.ws_connect(f"{gateway.url}/v1/realtime?model=omni")
    assert caught.value.status == 429
