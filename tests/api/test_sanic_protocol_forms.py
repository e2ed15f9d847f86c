"""Forms received as a whole: in any pieces, followed by another request, cut, slow, refused. TLS: test_access."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from mstar_core.api.http.sanic_protocol import FIRST_BYTES, WholeBody
from mstar_core.errors import Overloaded
from tests.api.conftest import Api, Started
from tests.fakes import media
from tests.fakes.conductor import echo
from tests.fakes.omni_model import SPEC

PICTURE = media.image(200, 150, "BMP")  # 90 kB: several reads of the socket
FIELDS = {"text": "x", "streaming": "false"}


def form(file: bytes = PICTURE, request_id: str = "one") -> bytes:
    """Return a whole request."""
    parts = [f'name="{name}"\r\n\r\n{value}'.encode() for name, value in FIELDS.items()]
    parts.append(b'name="files"; filename="a"\r\n\r\n' + file)
    body = b"".join(b"--b\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + b"--b--\r\n"
    head = (
        f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-ID: {request_id}\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode() + b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + body


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(size))


async def opened(api: Api) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", api.process.port)


def held(api: Api) -> float:
    """Return the bytes of bodies that the api holds."""
    return api.process.link.gauges()["bodies_bytes"]


@pytest.mark.parametrize("size", [7, 60_000])
async def test_a_body_in_any_pieces_is_the_same_request(started: Started, size: int) -> None:
    async with started(echo, model=SPEC) as api:
        file = media.image() if size < 100 else PICTURE
        reader, writer = await opened(api)
        data = form(file)
        for at in range(0, len(data), size):
            writer.write(data[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
        status, answer = await answer_of(reader)
        whole = await api.client.post("/generate", data=FIELDS, files={"files": ("a", file)})
        assert (status, answer["outputs"]) == (200, whole.json()["outputs"])
        writer.close()
        await api.clean()


async def test_requests_that_follow_in_the_same_write_are_answered_in_order(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        reader, writer = await opened(api)
        names = ["one", "two", "three"]
        writer.write(b"".join(form(request_id=name) for name in names))
        for name in names:
            status, answer = await answer_of(reader)
            assert (status, answer["request_id"]) == (200, name)
        writer.close()
        await api.clean()


async def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        for leaves in ("close", "abort", "eof"):
            _, writer = await opened(api)
            writer.write(form()[:-20_000])
            await writer.drain()
            await api.until(lambda: held(api) > 20_000)
            if leaves == "eof":
                writer.write_eof()
            elif leaves == "abort":
                writer.transport.abort()
            else:
                writer.close()
            await api.until(lambda: held(api) == 0)
            writer.close()
        assert not api.fake.requests
        await api.clean()


async def test_a_body_that_comes_is_cancelled_by_its_id_and_the_connection_goes_on(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        reader, writer = await opened(api)
        data = form(request_id="mine")
        writer.write(data[:-20_000])
        await api.until(lambda: api.process.registry.arrives("mine", "") is not None)
        assert (await api.client.post("/v1/requests/mine/cancel")).status_code == 200
        writer.write(data[-20_000:])
        assert (await answer_of(reader))[0] == 499
        writer.write(form(request_id="next"))
        assert (await answer_of(reader))[0] == 200
        writer.close()
        await api.clean()


async def test_forms_of_any_size_count_against_the_limit(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1 << 19
    monkeypatch.setattr("mstar_core.api.http.body.INLINE_FORM_BYTES", 1 << 16)  # larger ones are parsed on a thread
    async with started(echo, model=SPEC, max_body_bytes=most) as api:
        for file, status in ((media.image(), 200), (PICTURE, 200), (bytes(most), 413), (bytes(4 * most), 413)):
            answer = await api.client.post("/generate", data=FIELDS, files={"files": ("a", file)})
            assert answer.status_code == status
        await api.clean()


class Connection:
    """A transport whose input the test provides. protocol: receiver of its events."""

    def __init__(self) -> None:
        self.protocol: Any = None

    def is_closing(self) -> bool:
        return False

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def resume_reading(self) -> None:
        """Nothing was paused."""

    def come(self, data: bytes) -> None:
        place = self.protocol.get_buffer(-1)
        place[: len(data)] = data
        del place
        self.protocol.buffer_updated(len(data))


def coming(size: int) -> tuple[WholeBody, Connection]:
    transport = Connection()
    sanic = SimpleNamespace(transport=transport, record=lambda data: None)
    http = SimpleNamespace(protocol=sanic, recv_buffer=bytearray(b"abc"), request_bytes_left=size)
    return WholeBody(http), transport


async def test_below_the_floor_it_ends_with_its_window_and_above_it_goes_on() -> None:
    window_s = 0.05
    body, transport = coming(10)
    waiting = asyncio.create_task(body.receive(3, window_s))
    await asyncio.sleep(0)
    transport.come(b"def")
    assert not await waiting, "three bytes were enough for the first window, none for the second"
    assert body.missing == 4 and transport.protocol is body._sanic
    body, transport = coming(6)
    waiting = asyncio.create_task(body.receive(3, 60))
    await asyncio.sleep(0)
    transport.come(b"def")
    assert await waiting and body.data == b"abcdef" and transport.protocol is body._sanic


async def test_what_follows_the_body_stays_where_it_was() -> None:
    body, transport = coming(2)
    assert await body.receive(1, 60)
    assert body.data == b"ab" and body._http.recv_buffer == b"c" and transport.protocol is None


async def test_no_upload_is_written_to_a_file(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise AssertionError("a file was written for what is in memory anyway")

    monkeypatch.setattr("tempfile.TemporaryFile", none)
    async with started(echo, model=SPEC) as api:
        picture = media.image(1200, 1000, "BMP")
        answer = await api.client.post("/generate", data=FIELDS, files={"files": ("a", picture)})
        assert answer.status_code == 200
        await api.clean()


async def test_a_long_body_takes_memory_as_it_comes_and_is_whole_at_the_end() -> None:
    taken: list[int] = []
    size = 5 * FIRST_BYTES + 3
    transport = Connection()
    http = SimpleNamespace(
        protocol=SimpleNamespace(transport=transport, record=lambda data: None),
        recv_buffer=bytearray(b"abc"),
        request_bytes_left=size,
    )
    body = WholeBody(http, taken.append)
    assert taken == [FIRST_BYTES], "a length alone holds little"
    waiting = asyncio.create_task(body.receive(0, 60))
    await asyncio.sleep(0)
    sent = bytearray(b"abc")
    while len(sent) < size:
        room = body.get_buffer(-1)
        piece = bytes([len(taken)]) * min(len(room), 700_001)
        del room
        transport.come(piece)
        sent += piece
        assert sum(taken) <= max(FIRST_BYTES, 2 * len(sent) + 2)
    assert await waiting and body.data == sent and sum(taken) == size


async def test_a_body_for_which_there_is_no_more_room_is_refused_while_it_comes() -> None:
    taken: list[int] = []

    def take(size: int) -> None:
        taken.append(size)
        if len(taken) > 1:
            raise Overloaded("full")

    transport = Connection()
    http = SimpleNamespace(
        protocol=SimpleNamespace(transport=transport, record=lambda data: None),
        recv_buffer=bytearray(),
        request_bytes_left=4 * FIRST_BYTES,
    )
    body = WholeBody(http, take)
    waiting = asyncio.create_task(body.receive(0, 60))
    await asyncio.sleep(0)
    transport.come(bytes(FIRST_BYTES))
    transport.come(b"x")
    assert http.request_bytes_left == 3 * FIRST_BYTES - 1, "what was read is not read again"
    with pytest.raises(Overloaded):
        await waiting
    assert transport.protocol is body._sanic
