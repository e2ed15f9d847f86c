"""The gateway's worker over TLS, in the test's own process: HTTPS and wss for clients that trust it, nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import WSMsgType, web

from mstar_core.errors import ConfigError
from mstar_core.gateway.process.spec import GatewaySpec
from mstar_core.gateway.process.worker import GatewayWorker, tls_context
from mstar_core.gateway.serve_file import ServeFile, load_serve_file
from tests.fakes.certificates import certificate_in, encrypted
from tests.fakes.deployments import FakeDeployment

LIMIT_S = 120


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    """Answer as a deployment: events, a WebSocket that repeats, and a model card."""
    if request.path == "/v1/models":
        return web.json_response({"object": "list", "data": [{"id": "llm-weights", "object": "model"}]})
    if request.headers.get("Upgrade", "").lower() == "websocket":
        upgraded = web.WebSocketResponse()
        await upgraded.prepare(request)
        message = await upgraded.receive()
        await upgraded.send_str(f"heard {message.data}")
        await upgraded.close()
        return upgraded
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for word in (b"one", b"two"):
        await response.write(b"data: " + word + b"\n\n")
    await response.write_eof()
    return response


@dataclass(frozen=True)
class Secure:
    """A gateway that serves HTTPS. cert, key: its files, which tests may replace."""

    worker: GatewayWorker
    port: int
    cert: Path
    key: Path

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def client(self) -> aiohttp.ClientSession:
        """Return a client that trusts the certificate as it is now."""
        trusted = ssl.create_default_context(cafile=self.cert)
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted))


@pytest.fixture
async def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Secure]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fake = FakeDeployment("llm", handler=answer)
    await fake.start()
    cert, key = certificate_in(tmp_path)
    listener, admin = socket.socket(), socket.socket(socket.AF_UNIX)
    listener.bind(("127.0.0.1", 0))
    listener.setblocking(False)
    short = tempfile.TemporaryDirectory(dir="/tmp")  # the path of a socket has at most 107 bytes
    admin.bind(f"{short.name}/a.sock")
    port = listener.getsockname()[1]
    file = tmp_path / "serve.yaml"
    model = f"models:\n  llm: {{url: '{fake.url}'}}\n"
    file.write_text(f"port: {port}\ntls_cert: {cert.name}\ntls_key: {key.name}\n{model}")
    folders = dict.fromkeys(("run_dir", "log_dir", "state_dir"), str(tmp_path))
    read, write = os.pipe()
    worker = GatewayWorker(GatewaySpec(name="g", serve=load_serve_file(file), **folders), write)
    run = asyncio.create_task(worker.run(listener, admin))
    try:
        async with asyncio.timeout(LIMIT_S):
            ready = asyncio.create_task(asyncio.to_thread(os.read, read, 1))
            await asyncio.wait({ready, run}, return_when=asyncio.FIRST_COMPLETED)
            assert ready.done(), await run
        yield Secure(worker, port, cert, key)
        worker.stop(is_final=True)
        async with asyncio.timeout(LIMIT_S):
            await run
    finally:
        run.cancel()
        os.close(read)
        await fake.close()
        short.cleanup()


async def chat(client: aiohttp.ClientSession, url: str) -> str:
    async with client.post(f"{url}/v1/completions", json={"model": "llm", "prompt": "a", "stream": True}) as response:
        return f"{response.status} {await response.text()}"


async def test_a_client_that_trusts_the_certificate_gets_events_sockets_and_lists(secure: Secure) -> None:
    assert secure.worker.spec.url == secure.url
    async with secure.client() as client:
        assert await chat(client, secure.url) == "200 data: one\n\ndata: two\n\n"
        async with client.ws_connect(f"{secure.url}/v1/realtime?model=llm") as upgraded:
            await upgraded.send_str("hello")
            message = await upgraded.receive()
            assert (message.type, message.data) == (WSMsgType.TEXT, "heard hello")
        async with client.get(f"{secure.url}/v1/models") as listed:
            cards: list[dict[str, Any]] = (await listed.json())["data"]
            assert [card["id"] for card in cards] == ["llm"]


async def test_a_client_without_the_authority_does_not_send_its_request(secure: Secure) -> None:
    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await chat(client, secure.url)
    async with secure.client() as client:
        assert (await chat(client, secure.url)).startswith("200"), "others are not disturbed"


async def test_plain_http_is_refused_with_the_way_out_and_https_goes_on(secure: Secure) -> None:
    plain = secure.url.replace("https:", "http:")
    async with aiohttp.ClientSession() as client, asyncio.timeout(LIMIT_S):
        async with client.post(f"{plain}/v1/chat/completions", json={"prompt": "a" * 300_000}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (400, "https_required") and "https://" in error["message"]
        async with client.head(f"{plain}/health") as response:
            assert response.status == 400
    async with secure.client() as client:
        assert (await chat(client, secure.url)).startswith("200")


async def test_a_silent_connection_delays_neither_others_nor_the_end(secure: Secure) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", secure.port)
    async with secure.client() as client:
        assert (await chat(client, secure.url)).startswith("200")
    secure.worker.stop(is_final=True)  # the fixture waits for the end of the worker
    writer.close()


async def test_a_reload_takes_a_new_certificate_for_new_connections(secure: Secure, tmp_path: Path) -> None:
    async with secure.client() as kept:
        assert (await chat(kept, secure.url)).startswith("200")
        fresh = certificate_in(tmp_path / "fresh")
        for source, target in zip(fresh, (secure.cert, secure.key), strict=True):
            target.write_bytes(source.read_bytes())
        await secure.worker.reload()
        assert (await chat(kept, secure.url)).startswith("200"), "its connection stays"
    async with secure.client() as client:
        assert (await chat(client, secure.url)).startswith("200")


def test_an_encrypted_key_is_refused_and_no_password_is_asked_for(tmp_path: Path) -> None:
    cert, key = certificate_in(tmp_path)
    locked = encrypted(key, tmp_path / "locked.pem")
    with pytest.raises(ConfigError, match="the certificate cannot be used"):
        tls_context(ServeFile(tls_cert=str(cert), tls_key=str(locked)))
