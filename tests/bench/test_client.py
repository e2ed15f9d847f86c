"""The measuring client against servers that cut their answer at every place where a network may."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from bench.serving.client import Heard, ask

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: application/x-ndjson\r\n\r\n"
Writer = asyncio.StreamWriter
LIMIT_S = 60.0


def line(modality: str, data: bytes = b"", **metadata: Any) -> bytes:
    item = {"modality": modality, "data": base64.b64encode(data).decode(), "metadata": metadata}
    return json.dumps(item).encode() + b"\n"


def chunked(*parts: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


@asynccontextmanager
async def server(answer: Callable[[Writer], Any]) -> AsyncIterator[int]:
    """Serves `answer` on a port of its own. Leaving waits until every connection has been closed by its client."""
    under_way: set[asyncio.Task[Any] | None] = set()

    async def one(reader: asyncio.StreamReader, writer: Writer) -> None:
        under_way.add(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length)) == {"text": "hi"}
        with suppress(ConnectionError):
            await answer(writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    listener = await asyncio.start_server(one, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(task for task in under_way if task is not None))


async def hear(answer: Callable[[Writer], Any], **options: Any) -> Heard:
    async with server(answer) as port:
        return await ask(port, {"text": "hi"}, limit_s=LIMIT_S, **options)


def saying(wire: bytes, size: int = 1 << 20) -> Callable[[Writer], Any]:
    async def answer(writer: Writer) -> None:
        for at in range(0, len(wire), size):
            writer.write(wire[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)

    return answer


SOUNDS = [bytes(range(n)) for n in (2, 4, 6, 128)]
WHOLE = [
    line("start"),
    *(line("audio", sound, samples=len(sound) // 2) for sound in SOUNDS),
    b"\n",
    line("done", usage={"ttft_ms": 5.0}),
]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_bytes_may_come_in_any_pieces(size: int) -> None:
    heard = await hear(saying(chunked(*WHOLE), size))
    assert (heard.code, heard.is_done, heard.usage) == ("", True, {"ttft_ms": 5.0})
    assert heard.samples == [1, 2, 3, 64]
    assert heard.marks == sorted(heard.marks) and heard.sent_s < heard.marks[0] <= heard.ended_s


async def test_lines_need_not_be_chunks() -> None:
    joined = b"".join(WHOLE)
    heard = await hear(saying(chunked(joined[:50], joined[50:300], joined[300:])))
    assert heard.samples == [1, 2, 3, 64] and not heard.code


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (chunked(*WHOLE[:3]), "cut"),
        (chunked(*WHOLE)[:-200], "cut"),
        (chunked(WHOLE[1], line("error", b"no", code="engine_error", status=500)), "engine_error"),
        (b'HTTP/1.1 429 Busy\r\nContent-Length: 33\r\n\r\n{"error": {"code": "queue_full"}}', "queue_full"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 3\r\n\r\nbad", "http_502"),
        (b"", "cut"),
    ],
    ids=["no done line", "no end", "error line", "refused", "not ours", "nothing"],
)
async def test_what_did_not_end_well_has_a_code(wire: bytes, code: str) -> None:
    heard = await hear(saying(wire))
    assert heard.code == code


async def test_a_client_that_leaves_closes_its_connection() -> None:
    async def endless(writer: Writer) -> None:
        writer.write(HEAD)
        while True:  # until the client's going ends it, which the server waits for
            part = line("audio", b"ab")
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
            await asyncio.sleep(0.001)

    heard = await hear(endless, leave_after_s=0.05)  # how much it hears until then is the machine's affair
    assert heard.code == "left"
