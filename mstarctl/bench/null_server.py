"""Null server of the self-test: fixed answers over bare asyncio, with known delays. Run in a process of its own.

`python -m mstarctl.bench.null_server '{"delay_s": 0.05}'` prints its port and serves until stdin closes.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from contextlib import suppress
from typing import Final

import msgspec

from mstarctl.bench.client.process import TIMER_S, event_loop

ANSWER: Final = base64.b64encode(b"word ").decode()
HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: keep-alive\r\n\r\n"
)
DONE: Final = b'{"modality":"done","data":"","metadata":{}}\n'
NOT_FOUND: Final = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class NullBehaviour(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed behaviour. delay_s: before the first line. lines: of each answer, gap_s apart.

    stall_s: pause of the whole server, stall_at_s after its first request. status: of every answer; 200 streams.
    breaks_at: line after which the connection breaks, 0 never. fails_at: line in whose place an error comes, 0 never.
    hangs: never answer. line_bytes: size of each line's text. retry_after_s, sentence: of a refusal or an error.
    gathers: answer nothing before so many requests are there.
    """

    delay_s: float = 0.0
    lines: int = 1
    gap_s: float = 0.0
    stall_s: float = 0.0
    stall_at_s: float = 0.0
    status: int = 200
    breaks_at: int = 0
    fails_at: int = 0
    hangs: bool = False
    gathers: int = 0
    line_bytes: int = 0
    retry_after_s: int = -1
    sentence: str = ""


class NullConnection(asyncio.Protocol):
    """One connection, which answers its requests in order. Owned by the event loop."""

    def __init__(self, server: NullServer) -> None:
        self._server = server
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end]).lower()
            size = next(
                (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            if len(self._data) < end + 4 + size:
                return
            del self._data[: end + 4 + size]
            self._answer(head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for task in self._tasks:
            task.cancel()

    def write(self, data: bytes) -> None:
        """Write if the client is still there."""
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        """Break the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _answer(self, head: bytes) -> None:
        if head.startswith(b"get "):
            self.write(NOT_FOUND)
        elif self._server.is_immediate:
            self.write(self._server.whole)
        else:
            task = asyncio.get_running_loop().create_task(self._server.stream(self))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


class NullServer:
    """Answers of all connections. first_s: time of the first request, from which a stall counts."""

    def __init__(self, behaviour: NullBehaviour) -> None:
        self._behaviour = behaviour
        self._first_s: float | None = None
        self._came = 0
        self._is_gathered = asyncio.Event()
        text = ANSWER if not behaviour.line_bytes else base64.b64encode(b"x" * behaviour.line_bytes).decode()
        line = f'{{"modality":"text","data":"{text}","metadata":{{}}}}\n'.encode()
        self._line = chunked(line)
        self._error = chunked(b'{"modality":"error","data":"","metadata":{"code":"engine_error","status":500}}\n')
        self._refusal = refusal(behaviour)
        self.whole = HEAD + self._line * behaviour.lines + chunked(DONE) + b"0\r\n\r\n"
        self.is_immediate = behaviour == NullBehaviour(lines=behaviour.lines, line_bytes=behaviour.line_bytes)

    async def stream(self, connection: NullConnection) -> None:
        """Answer one request with the delays."""
        told = self._behaviour
        came_s = time.monotonic()
        self._first_s = self._first_s or came_s
        if told.hangs:
            await asyncio.sleep(3600)
        self._came += 1
        if self._came >= told.gathers:
            self._is_gathered.set()
        await self._is_gathered.wait()
        await self._until(time.monotonic() + told.delay_s)
        if told.status != 200:
            connection.write(self._refusal)
            return
        connection.write(HEAD)
        held_ms = 1e3 * (time.monotonic() - came_s)
        for number in range(1, told.lines + 1):
            if number > 1:
                await self._until(time.monotonic() + told.gap_s)
            if number == told.breaks_at:
                connection.abort()
                return
            if number == told.fails_at:
                connection.write(self._error + b"0\r\n\r\n")
                return
            connection.write(self._line)
        done = f'{{"modality":"done","data":"","metadata":{{"usage":{{"total_ms":{held_ms:.4f}}}}}}}\n'
        connection.write(chunked(done.encode()) + b"0\r\n\r\n")

    async def _until(self, at_s: float) -> None:
        """Sleep until a time, and longer if it lies in the stall."""
        assert self._first_s is not None
        begin = self._first_s + self._behaviour.stall_at_s
        if begin <= at_s < begin + self._behaviour.stall_s:
            at_s = begin + self._behaviour.stall_s
        await asyncio.sleep(max(0.0, at_s - time.monotonic() - TIMER_S))
        while time.monotonic() < at_s:  # noqa: ASYNC110  no event marks a moment
            await asyncio.sleep(0)  # timers have a resolution of a millisecond, so turns of the loop do the rest


def refusal(behaviour: NullBehaviour) -> bytes:
    """Return the whole answer of a server that refuses or fails a request."""
    told = msgspec.json.encode({"error": {"code": "invalid_value", "message": behaviour.sentence}})
    body = told if behaviour.sentence else b""
    wait = f"Retry-After: {behaviour.retry_after_s}\r\n" if behaviour.retry_after_s >= 0 else ""
    return f"HTTP/1.1 {behaviour.status} Error\r\nContent-Length: {len(body)}\r\n{wait}\r\n".encode() + body


def chunked(data: bytes) -> bytes:
    """Return data as one chunk of the transfer coding."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def serve(behaviour: NullBehaviour) -> None:
    """Print the port and serve until stdin closes."""
    loop = asyncio.get_running_loop()
    null_server = NullServer(behaviour)
    server = await loop.create_server(lambda: NullConnection(null_server), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    with suppress(asyncio.CancelledError):
        await loop.run_in_executor(None, sys.stdin.read)
    server.close()


def main() -> None:
    """Serve with the behaviour of the command line."""
    behaviour = msgspec.json.decode(sys.argv[1].encode() if len(sys.argv) > 1 else b"{}", type=NullBehaviour)
    with asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(serve(behaviour))


if __name__ == "__main__":
    main()
