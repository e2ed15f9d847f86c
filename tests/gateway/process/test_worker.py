"""Connections of the gateway's server on which no request arrives, its certificate, and its reload by a signal."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from aiohttp import web

from mstar_core.errors import ConfigError, StartError
from mstar_core.gateway.process.worker import CountedServer, check_command, tls_context
from mstar_core.gateway.serve_file import ServeFile
from tests.fakes.deployments import serve_on_port


async def test_a_connection_without_a_request_is_closed() -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        server.silent.pop(request.protocol, None)
        return web.Response(text="served")

    server = CountedServer(answer)
    url, close = await serve_on_port(server)
    port = int(url.rpartition(":")[2])
    silent, _silent_writer = await asyncio.open_connection("127.0.0.1", port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert await reader.readuntil(b"served")
    server.close_silent(time.monotonic())
    assert await silent.read() == b""
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert await reader.readuntil(b"served")
    for each in (writer, _silent_writer):
        each.close()
    await close()


def test_a_certificate_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match="the certificate cannot be used"):
        tls_context(ServeFile(tls_cert="/nowhere/a.pem", tls_key="/nowhere/a.key"))


async def test_a_signal_reloads_no_file_with_a_model_that_can_never_start(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("models: {chat: no_such_model}\n")
    with pytest.raises(StartError, match="chat cannot start"):
        await check_command(str(file))
