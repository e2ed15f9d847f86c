"""Many clients that receive streams of paced audio, in a separate process; each checks every byte."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from tests.fakes.paced import SAMPLES, STAMP_BYTES

CHUNK_BYTES: Final = 2 * SAMPLES
LIMIT_S: Final = 250
SLOW_BYTES_PER_S: Final = 512
SLOW_TURN_S: Final = 0.5


@dataclass(slots=True)
class Listened:
    """Record of one client. latency_s: from the worker's send to the client, per chunk. at_s: arrival times.

    wrong: chunks with unexpected bytes or out of order. is_whole: the body ended regularly.
    """

    status: int = 0
    latency_s: list[float] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    sent_s: float = 0.0
    wrong: int = 0
    is_whole: bool = False
    received_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Audience:
    """Number of clients by kind. mute: read nothing. slow: read a few bytes per second. Both request large chunks."""

    good: int
    mute: int = 0
    slow: int = 0


@contextmanager
def listening(port: int, audience: Audience) -> Iterator[Connection]:
    """Run the clients during the block. The pipe returns one list of `Listened` fields by kind."""
    with spawned(_run, port, audience) as pipe:
        yield pipe


@contextmanager
def spawned(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run a process that calls target(*arguments, pipe) during the block; yields the other end of the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def heard_of(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[Listened]]:
    """Return the records from the pipe, by kind of client."""
    return {kind: [Listened(**each) for each in many] for kind, many in found.items()}


def _run(port: int, audience: Audience, pipe: Connection) -> None:
    pipe.send({kind: [asdict(each) for each in many] for kind, many in asyncio.run(_all(port, audience)).items()})


async def _all(port: int, audience: Audience) -> dict[str, list[Listened]]:
    goods = [asyncio.create_task(_good(port)) for _ in range(audience.good)]
    bads = [
        asyncio.create_task(_bad(port, reads)) for reads in (0,) * audience.mute + (SLOW_BYTES_PER_S,) * audience.slow
    ]
    async with asyncio.timeout(LIMIT_S):
        heard = list(await asyncio.gather(*goods))
        ended = list(await asyncio.gather(*bads))
    return {"good": heard, "bad": ended}


def _request(text: str) -> bytes:
    body = json.dumps({"input": text, "stream": True, "response_format": "pcm"}).encode()
    head = "POST /v1/audio/speech HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def _good(port: int) -> Listened:
    heard = Listened()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard.sent_s = time.monotonic()
    writer.write(_request("good"))
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        head = await reader.readuntil(b"\r\n\r\n")
        heard.status = int(head.split(b" ", 2)[1])
        held = bytearray()
        while size := int(await reader.readuntil(b"\r\n"), 16):
            held += (await reader.readexactly(size + 2))[:size]
            while len(held) >= CHUNK_BYTES:
                _take(heard, bytes(held[:CHUNK_BYTES]))
                del held[:CHUNK_BYTES]
        heard.is_whole = not held
    writer.close()
    return heard


def _take(heard: Listened, data: bytes) -> None:
    now = time.monotonic()
    stamp_ns, index = struct.unpack_from("<qq", data)
    heard.latency_s.append(now - stamp_ns / 1e9)
    heard.at_s.append(now)
    rest = (index & 0x7FFF).to_bytes(2, "little") * ((CHUNK_BYTES - STAMP_BYTES) // 2)
    heard.wrong += index != len(heard.at_s) - 1 or data[STAMP_BYTES:] != rest
    heard.received_bytes += len(data)


async def _bad(port: int, bytes_per_s: int) -> Listened:
    heard = Listened()
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        heard.sent_s = time.monotonic()
        await loop.sock_sendall(connection, _request("large"))
        with suppress(ConnectionError):
            while not await _is_cut(connection):
                piece = await loop.sock_recv(connection, int(bytes_per_s * SLOW_TURN_S)) if bytes_per_s else b""
                heard.received_bytes += len(piece)
                await asyncio.sleep(SLOW_TURN_S)
    heard.at_s.append(time.monotonic())  # when the server aborted it
    return heard


async def _is_cut(connection: socket.socket) -> bool:
    # A reset is a pending error of the socket, which is visible without reading.
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
