"""Fast paths below Sanic: chunked response bodies, whole request bodies, signal dispatch. Used by exchange and app.

Only this module and `connection` rely on internals of Sanic. `RELEASE` names the release that they are written for, and
a test compares it with the installed one. `bench/api_chunks.py` and `bench/api_clips.py` measure what each fast path
saves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self

from sanic import Request, Sanic
from sanic.exceptions import RequestCancelled
from sanic.http import Http

RELEASE: Final = "25.12"

LARGE_BYTES: Final = 16 * 1024
"""Parts of at least this size are written immediately, and then yield to other streams."""

UNCOPIED_BYTES: Final = 256 * 1024
"""Parts of at least this size are written separately from their framing, because joining would copy them."""

FIRST_BYTES: Final = 1 << 20
"""Memory allocated for a longer request body before any of it has arrived."""

LAST_CHUNK: Final = b"0\r\n\r\n"
"""End of a chunked body."""

ZEROS: Final = bytes(FIRST_BYTES)

log = logging.getLogger("mstar.api")


class Application(Sanic[Any, Any]):
    """Sanic without its `http.*` signals, which have no listeners here: ten per request, a tenth of its CPU time."""

    def dispatch(self, event: str, **arguments: Any) -> Coroutine[Any, Any, Any]:
        """Skip events of requests; Sanic itself is slow to find out that they have no listeners."""
        return _skipped() if event.startswith("http.") else super().dispatch(event, **arguments)


async def _skipped() -> None:
    return None


def limit_headers(size_bytes: int) -> None:
    """Set the limit of request headers; Sanic's own is 16 KiB, checked when the next line ends."""
    Http.HEADER_CEILING = Http.HEADER_MAX_SIZE = size_bytes


async def start_app(app: Sanic[Any, Any]) -> None:
    """Complete the routes of an application, which serves connections of our own listener."""
    app.asgi = False
    starting: Any = app
    await starting._startup()


class WriteBatch:
    """Response bodies that have parts to write in the next loop iteration. One per api, owned by the service."""

    def __init__(self) -> None:
        self._bodies: list[ChunkedBody] = []

    def add(self, body: ChunkedBody) -> None:
        """Schedule a flush of `body` for the next loop iteration."""
        if not self._bodies:
            asyncio.get_running_loop().call_soon(self._write)
        self._bodies.append(body)

    def _write(self) -> None:
        bodies, self._bodies = self._bodies, []
        for body in bodies:
            try:
                body.flush()
            except Exception:  # isolation boundary: one connection
                log.exception("a part of a response could not be written")
                body.abort()


class ChunkedBody:
    """Body of a streamed response, written directly to the connection with HTTP/1.1 chunked framing.

    Owned by the exchange. Sanic sends the head and the end. Between them its own path takes a signal, five coroutines
    and a timeout per part, which nearly doubles the CPU time of a chunk. Small parts of all streams are written
    together in the next loop iteration, because consecutive socket calls are cheaper than interleaved ones.
    """

    def __init__(self, protocol: Any, batch: WriteBatch) -> None:
        self._protocol = protocol
        self._batch = batch
        self._parts: list[bytes] = []

    @classmethod
    def begun(cls, request: Request, batch: WriteBatch) -> ChunkedBody | None:
        """Return the body of a response whose head was sent; None if Sanic does not send it in chunks."""
        http: Any = request.stream
        is_chunked = http is not None and http.response_func == http.http1_response_chunked
        return cls(http.protocol, batch) if is_chunked else None

    def write(self, data: bytes | memoryview) -> bool:
        """Write or schedule a non-empty part. Returns False, without effect, under backpressure.

        Raises RequestCancelled, a CancelledError, if the connection is closed.
        """
        protocol = self._protocol
        if not protocol._can_write.is_set():  # cleared while the transport buffers more than 64 KiB
            return False
        if protocol.transport is None or protocol.transport.is_closing():
            raise RequestCancelled
        if len(data) >= UNCOPIED_BYTES:
            self.flush()
            protocol.write_parts(framed(memoryview(data)))
            return True
        self._parts.append(b"".join(framed(data)))
        if len(data) >= LARGE_BYTES:
            self.flush()
        elif len(self._parts) == 1:
            self._batch.add(self)
        return True

    def flush(self) -> None:
        """Write pending parts. Call it before anything else is written, or the connection is aborted."""
        parts, self._parts = self._parts, []
        transport = self._protocol.transport
        if parts and transport is not None and not transport.is_closing():
            transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def abort(self) -> None:
        """Abort the connection."""
        if self._protocol.transport is not None:
            self._protocol.transport.abort()


def framed(data: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    """Return a chunk of a body as buffers."""
    return b"%x\r\n" % len(data), data, b"\r\n"


class WholeBody(asyncio.BufferedProtocol):
    """Request body of known length, received directly into the memory from which it is parsed.

    Replaces Sanic's protocol during `receive`; owned by the exchange. Sanic's own path copies the data several times
    and takes a loop iteration per 64 KiB. Memory grows to at most twice the bytes that have arrived.

    missing: bytes not yet received. take: called before each allocation; its exceptions end the body.
    """

    def __init__(self, http: Any, take: Callable[[int], None] = lambda size: None) -> None:
        self._http = http
        self._take = take
        self._sanic = http.protocol
        self._full: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watcher: asyncio.TimerHandle | None = None
        self._is_slow = False
        self.missing = int(http.request_bytes_left)
        first = min(self.missing, max(FIRST_BYTES, len(http.recv_buffer)))
        take(first)
        self.data = bytearray(first)
        self._end = 0
        with memoryview(http.recv_buffer) as received:
            self._place(received[: self.missing])
        del http.recv_buffer[: self._end]

    @classmethod
    def of(cls, request: Request, most: int, take: Callable[[int], None]) -> Self | None:
        """Return the unread body of a request; None if its length is unknown or exceeds `most`. Raises as `take`."""
        http: Any = request.stream
        if http is None or http.request_body is not True or http.expecting_continue:
            return None
        return cls(http, take) if 0 < http.request_bytes_left <= most else None

    def _place(self, received: memoryview) -> None:
        self.data[self._end : self._end + len(received)] = received
        self._count(len(received))

    def _count(self, size: int) -> None:
        self.missing -= size
        self._end += size
        self._http.request_bytes_left = self.missing
        if not self.missing and not self._full.done():
            self._full.set_result(None)

    def _grow(self) -> None:
        more = min(len(self.data), self.missing)
        self._take(more)
        while more:
            step = min(more, len(ZEROS))
            self.data += ZEROS if step == len(ZEROS) else bytes(step)
            more -= step

    async def receive(self, floor_bytes: float, window_s: float) -> bool:
        """Wait for the rest. Returns False if less than `floor_bytes` arrive in any `window_s`. Raises as `take`."""
        if self._full.done():
            self._full.result()
        transport = self._sanic.transport
        if not self.missing or transport is None or transport.is_closing():
            return not self.missing
        transport.set_protocol(self)
        transport.resume_reading()
        self._watch(floor_bytes, window_s)
        try:
            await self._full  # without asyncio.timeout, which takes one more loop iteration
            return not self._is_slow
        finally:
            if self._watcher is not None:
                self._watcher.cancel()
            self._leave()

    def _watch(self, floor_bytes: float, window_s: float) -> None:
        def check(before: int) -> None:
            if self._full.done():
                return
            if before - self.missing < floor_bytes:
                self._is_slow = True
                self._full.set_result(None)
            else:
                self._watch(floor_bytes, window_s)

        self._watcher = asyncio.get_running_loop().call_later(window_s, check, self.missing)

    def _leave(self) -> None:
        transport = self._sanic.transport
        if transport is not None and transport.get_protocol() is self:
            transport.set_protocol(self._sanic)

    # asyncio.BufferedProtocol

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the free memory. It never exceeds the body, because another request may follow."""
        if self._end == len(self.data):  # no view of the memory exists now, so it can be resized
            try:
                self._grow()
            except Exception as error:  # noqa: BLE001  raised by `receive`, not in the connection
                if not self._full.done():
                    self._full.set_exception(error)
                return memoryview(bytearray(1))  # the transport must read at least one byte, which is dropped
        return memoryview(self.data)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Count received bytes."""
        self._sanic.record(memoryview(self.data)[self._end : self._end + nbytes])
        self._count(nbytes)
        if self._full.done():
            self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forward to Sanic, which cancels the handler."""
        self._sanic.connection_lost(exc)

    def pause_writing(self) -> None:
        """Forward to Sanic."""
        self._sanic.pause_writing()

    def resume_writing(self) -> None:
        """Forward to Sanic."""
        self._sanic.resume_writing()
