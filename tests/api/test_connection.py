"""Connections: their limit, idle ones at the limit, strict framing of requests, and responses to old clients."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from contextlib import AsyncExitStack
from typing import Any

import pytest

from mstar_core.api.http import connection as connections
from mstar_core.api.http.head import BadHead, checked_head
from mstar_core.api.http.listener import Listener, allowed_connections
from tests.api.conftest import LIMIT_S, Api, Started
from tests.fakes.conductor import speak

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def opened(stack: AsyncExitStack, api: Api, data: bytes = b"") -> Ends:
    """Open a connection and send `data`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.process.port)
    stack.callback(writer.close)
    writer.write(data)
    return reader, writer


async def answer_to(api: Api, data: bytes) -> bytes:
    """Return everything that the api sends until it closes the connection."""
    async with AsyncExitStack() as stack, asyncio.timeout(LIMIT_S):
        reader, _ = await opened(stack, api, data)
        return await reader.read()


async def first_line(api: Api, data: bytes) -> bytes:
    """Return the status line of a response, whose connection may stay open for the rest of a body."""
    async with AsyncExitStack() as stack, asyncio.timeout(LIMIT_S):
        reader, _ = await opened(stack, api, data)
        return await reader.readline()


def listener_of(api: Api) -> Listener:
    listener = api.process._listener
    assert listener is not None
    return listener


async def test_idle_connections_beyond_the_limit_make_room(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mstar.api.listener")
    async with started(speak(1), max_connections=8) as api, AsyncExitStack() as stack:
        kept = await opened(stack, api, b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in await kept[0].readline()
        ends = [await opened(stack, api, b"GET / HTTP/1.1\r\nHo") for _ in range(40)]
        for _ in range(3):
            assert (await api.client.get("/version")).status_code == 200
        assert len(listener_of(api).connections) <= 8
        async with asyncio.timeout(LIMIT_S):
            assert await ends[0][0].read() == b"", "the oldest half-open connection is closed"
        assert not kept[0].at_eof(), "a connection that has served a request outlives those that have not"
        assert len([each for each in caplog.records if each.name == "mstar.api.listener"]) == 1


async def test_a_busy_connection_is_never_evicted(started: Started) -> None:
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 17\r\n\r\n"
    async with started(speak(1), max_connections=8) as api, AsyncExitStack() as stack:
        busy = [await opened(stack, api, head + b"{") for _ in range(8)]
        await api.until(lambda: sum(not each.is_idle for each in listener_of(api).connections) == 8)
        waiting = await opened(stack, api, b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        for reader, writer in busy:
            assert not reader.at_eof()
            writer.write(b'"text": "hello"}')
            assert b" 200 " in await reader.readline()
            writer.close()
        assert b" 200 " in await waiting[0].read(), "it was accepted when another one ended"


class Exhausted:
    """A listening socket on a system without free descriptors."""

    def __init__(self, real: socket.socket) -> None:
        self.real = real
        self.tries = 0

    def fileno(self) -> int:
        return self.real.fileno()

    def accept(self) -> Any:
        self.tries += 1
        raise OSError(errno.EMFILE, "too many open files")


async def test_without_descriptors_the_listener_pauses_and_logs_once(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(speak(1)) as api:
        await api.client.aclose()
        listener = listener_of(api)
        await api.until(lambda: not listener.connections)
        exhausted = Exhausted(api.process.socket)
        listener._socket = exhausted  # type: ignore[assignment]
        for _ in range(5):
            listener._accept()
        assert exhausted.tries == 5
        assert listener._retry is not None, "the listener does not spin: it tries again later"
        assert len([each for each in caplog.records if each.name == "mstar.api.listener"]) == 1
        listener._socket = exhausted.real


def test_connections_leave_descriptors_for_everything_else() -> None:
    assert allowed_connections(2048, 1_048_576, 60) == 2048
    assert allowed_connections(2048, 1024, 60) == 1024 - 60 - 128
    assert allowed_connections(2048, 64, 40) == 12
    assert allowed_connections(2048, 64, 64) == 8


async def test_a_head_that_arrives_too_slowly_ends_the_connection(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections.StrictHttp, "head_s", 0.0)
    async with started(speak(1)) as api:
        answer = await answer_to(api, b"GET /version HTTP/1.1\r\n")
        assert answer.startswith(b"HTTP/1.1 408 "), answer


BAD = [
    b"CONNECT evil.example:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET version HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /version HTTP/1.1\r\n\r\n",
    b"GET /version HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /version HTTP/1.1\r\nHost: a b\r\n\r\n",
    b"GET /version HTTP/1.1\r\nHost : a\r\n\r\n",
    b"GET /version HTTP/1.1\r\nHost: a\r\n X: b\r\n\r\n",
    b"GET /version HTTP/1.1\r\nHost: a\r\nX: b\x0bc\r\n\r\n",
    b"GET /version HTTP/1.1\r\nHost: a\r\nX: b\x00\r\n\r\n",
    b"GET /version HTTP/1.1\r\nHost: a\r\nX: b\nY: c\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nX: y\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"POST /generate HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: \u0665\r\n\r\n".encode(),
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\nhello",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 5 5\r\n\r\nhello",
]


async def test_invalid_framing_is_400_and_ends_the_connection(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(speak(1)) as api:
        for data in BAD:
            answer = await answer_to(api, data + b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 400 "), (data, answer)
            assert answer.count(b"HTTP/1.1 ") == 1, "the rest is not read as another request"
        assert not [each for each in caplog.records if each.exc_info], "no traceback is logged"


JSON_HEAD = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


async def test_invalid_chunks_are_400(started: Started) -> None:
    async with started(speak(1)) as api:
        for data in (
            b"0x2\r\n{}\r\n0\r\n\r\n",
            b" 2\r\n{}\r\n0\r\n\r\n",
            b"2\r\n{}XX0\r\n\r\n",
            "\u0662\r\n{}\r\n0\r\n\r\n".encode(),
        ):
            answer = await answer_to(api, CHUNKED + data)
            assert answer.startswith(b"HTTP/1.1 400 "), (data, answer)
            assert answer.count(b"HTTP/1.1 ") == 1


async def test_framing_fields_may_have_spaces_and_capitals(started: Started) -> None:
    async with started(speak(1)) as api:
        for framing, body in (
            (b"Content-Length:\t017 \t", b'{"text": "hello"}'),
            (b"transfer-encoding: Chunked ", b'11\r\n{"text": "hello"}\r\n0\r\n\r\n'),
        ):
            answer = await answer_to(api, JSON_HEAD + framing + b"\r\nConnection: close\r\n\r\n" + body)
            assert answer.startswith(b"HTTP/1.1 200 "), (framing, answer)


async def test_a_huge_length_is_413_before_the_body_arrives(started: Started) -> None:
    async with started(speak(1)) as api:
        for length in (b"99999999999999999999999", b"9" * 17, b"%d" % (129 << 20)):
            answer = await first_line(api, JSON_HEAD + b"Content-Length: " + length + b"\r\n\r\n{")
            assert answer.startswith(b"HTTP/1.1 413 "), (length, answer)
        for size in (b"f" * 40, b"8100001", b"00000000000000000000ffffffffffff"):
            answer = await first_line(api, CHUNKED + size + b"\r\n{")
            assert answer.startswith(b"HTTP/1.1 413 "), (size, answer)


async def test_a_stream_to_an_old_client_ends_with_the_connection(started: Started) -> None:
    body = b"text=hello&output_modalities=audio"
    head = b"POST /generate HTTP/1.0\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: %d\r\n\r\n"
    async with started(speak(2)) as api:
        answer = await answer_to(api, head % len(body) + body)
        first, _, rest = answer.partition(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 200 ") and b"chunked" not in first.lower()
        assert rest.startswith(b"{") and rest.endswith(b"}\n"), rest
        assert b"connection: close" in first.lower()


async def test_405_names_the_allowed_methods(started: Started) -> None:
    async with started(speak(1)) as api:
        answer = await api.client.get("/generate")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert answer.json()["error"]["code"] == "method_not_allowed"


async def test_answers_have_a_reason_and_no_header_without_a_value(started: Started) -> None:
    async with started(speak(1)) as api:
        answer = await api.client.get("/version")
        assert "alt-svc" not in answer.headers
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert connections.STATUS_LINES[499] == b"HTTP/1.1 499 Client Closed Request\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: localhost:8000\r\nX-Empty:\r\nX:\ta \r\nName: caf\xc3\xa9",
        b"OPTIONS * HTTP/1.1\r\nHost: [::1]:8000",
        b"GET http://localhost/version HTTP/1.1\r\nHost: localhost",
        b"GET /v1/models/a%20b?x=1 HTTP/1.0",
        b"POST / HTTP/1.1\r\nHost: \r\nTransfer-Encoding: Chunked\t",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length:  005 ",
    ],
)
def test_valid_heads_pass(head: bytes) -> None:
    checked_head(head)


def test_a_head_without_a_host_is_refused() -> None:
    with pytest.raises(BadHead):
        checked_head(b"GET / HTTP/1.1")
