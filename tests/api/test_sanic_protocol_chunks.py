"""Parts of streamed responses on their way to the connection: order, framing, batching, disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import sanic
from sanic.http import Http
from sanic.server.protocols.base_protocol import SanicProtocol

from mstar_core.api.http.sanic_protocol import LARGE_BYTES, RELEASE, UNCOPIED_BYTES, ChunkedBody, WriteBatch


class Connection:
    """A Sanic protocol and its transport, as far as a body uses them. written: each call of `write`."""

    def __init__(self) -> None:
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.transport: Any = self
        self.written: list[bytes] = []
        self.is_closed = False
        self.is_broken = False

    def is_closing(self) -> bool:
        return self.is_closed

    def write(self, data: bytes) -> None:
        if self.is_broken:
            raise RuntimeError("the socket is broken")
        self.written.append(data)

    def write_parts(self, parts: Sequence[bytes]) -> None:
        self.written += parts

    def abort(self) -> None:
        self.is_closed = True


async def test_parts_of_all_streams_are_written_in_the_next_turn_each_once_and_in_order() -> None:
    burst, connections = WriteBatch(), [Connection() for _ in range(3)]
    bodies = [ChunkedBody(each, burst) for each in connections]
    for part in (b"a", b"bc" * 8):
        assert all(body.write(part) for body in bodies)
    assert [each.written for each in connections] == [[]] * 3
    await asyncio.sleep(0)
    assert [each.written for each in connections] == [[b"1\r\na\r\n10\r\n" + b"bc" * 8 + b"\r\n"]] * 3
    bodies[0].write(b"d")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [len(each.written) for each in connections] == [2, 1, 1]


async def test_a_large_part_goes_at_once_behind_what_was_held() -> None:
    burst, connection = WriteBatch(), Connection()
    body = ChunkedBody(connection, burst)
    body.write(b"small")
    body.write(b"x" * LARGE_BYTES)
    assert b"".join(connection.written) == b"5\r\nsmall\r\n4000\r\n" + b"x" * LARGE_BYTES + b"\r\n"
    await asyncio.sleep(0)
    assert len(connection.written) == 1


async def test_a_client_that_does_not_read_is_told_apart_from_one_that_left() -> None:
    burst, connection = WriteBatch(), Connection()
    body = ChunkedBody(connection, burst)
    connection._can_write.clear()
    assert not body.write(b"late")
    connection._can_write.set()
    body.write(b"held")
    connection.abort()
    with pytest.raises(asyncio.CancelledError):
        body.write(b"more")
    await asyncio.sleep(0)
    assert connection.written == []


async def test_a_connection_that_cannot_be_written_costs_no_other_its_part() -> None:
    burst, connections = WriteBatch(), [Connection() for _ in range(3)]
    connections[1].is_broken = True
    for each in connections:
        ChunkedBody(each, burst).write(b"a")
    await asyncio.sleep(0)
    assert [each.written for each in connections] == [[b"1\r\na\r\n"], [], [b"1\r\na\r\n"]]
    assert connections[1].is_closed


async def test_a_large_part_is_written_from_where_it_lies_behind_what_was_held_back() -> None:
    connection = Connection()
    body, large = ChunkedBody(connection, WriteBatch()), bytes(UNCOPIED_BYTES)
    assert body.write(b"a") and body.write(memoryview(large))
    assert b"".join(connection.written) == b"1\r\na\r\n40000\r\n" + large + b"\r\n"
    assert any(isinstance(part, memoryview) and part.obj is large for part in connection.written)


def test_the_fast_paths_are_written_for_the_installed_release_of_sanic() -> None:
    """Review `sanic_protocol` against a new release before changing `RELEASE`."""
    assert sanic.__version__.startswith(f"{RELEASE}.")
    names = {"request_body", "request_bytes_left", "response_func", "recv_buffer", "expecting_continue", "protocol"}
    assert names <= set(Http.__slots__) and callable(Http.http1_response_chunked) and Http.HEADER_CEILING
    assert "_can_write" in SanicProtocol.__slots__
