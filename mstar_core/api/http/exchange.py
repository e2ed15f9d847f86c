"""One HTTP exchange: what every route knows of its request, and the ways in which it may answer. Made by the app."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sanic import Request
from sanic.exceptions import BadRequest, PayloadTooLarge
from sanic.response import HTTPResponse

from mstar_core.api.errors import Stalled
from mstar_core.api.http.access import cors_headers
from mstar_core.api.http.body import FLOOR_BYTES_PER_S, FLOOR_WINDOW_S, SKIPPED_BYTES, BodyLimits, read_pieces, too_slow
from mstar_core.api.http.chunked import LARGE_BYTES, ChunkedBody
from mstar_core.api.http.whole_body import WholeBody
from mstar_core.api.requests import check_request_id, new_request_id, trace_id_of, unescaped
from mstar_core.api.service import Service
from mstar_core.errors import RequestError, TooLarge
from mstar_core.process.logs import REQUEST_ID

JSON = "application/json; charset=utf-8"
PART_BYTES = 1 << 20
"""Most that is written at once: what the socket does not take is copied, and others wait meanwhile."""

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER on, for no time: closing sends a reset and frees the send buffer."""


@dataclass(slots=True)
class Exchange:
    """A request and its answer. Owned by the app's wrapper; routes get it for the length of their handler.

    trace_id: of the client's trace where it sent one, else new. is_native: errors carry the older key too. has_begun:
    the first byte of the answer is out. held_bytes: of its body, counted until it is over.
    """

    service: Service
    request: Request
    route: str
    request_id: str
    trace_id: str = ""
    key: str = ""
    is_native: bool = False
    has_begun: bool = False
    held_bytes: int = 0
    started: float = 0.0
    status: int = 200
    code: str = "ok"
    headers: dict[str, str] = field(default_factory=dict)
    _stream: Any = None
    _body: ChunkedBody | None = None

    @property
    def limits(self) -> BodyLimits:
        api = self.service.deployment.api
        return BodyLimits(body=api.max_body_bytes, text=api.max_text_bytes, files=api.max_files)

    @property
    def content_type(self) -> str:
        return str(self.request.headers.get("content-type") or "")

    @property
    def path_name(self) -> str:
        """The `{name}` of the path, its percent escapes undone: clients escape what may stand in an id."""
        return unescaped(str(self.request.match_info["name"]))

    @property
    def timeout_header(self) -> str | None:
        value = self.request.headers.get("x-request-timeout")
        return str(value) if value is not None else None

    def name(self, request_id: Any) -> None:
        """Take the client's id from the body; it stands above the header. Raises RequestError."""
        if request_id is None:
            return
        if not isinstance(request_id, str):
            raise RequestError("request_id is not a string", field="request_id")
        self.request_id = check_request_id(request_id)
        REQUEST_ID.set(self.request_id)

    def warn(self, warnings: Sequence[str]) -> None:
        """Tell the client in a header."""
        if warnings:
            self.headers["X-Mstar-Warnings"] = header_text("; ".join(warnings))

    def json(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> HTTPResponse:
        """A whole JSON answer."""
        return self.whole(msgspec.json.encode(body), JSON, status, headers)

    def whole(
        self, body: bytes, content_type: str, status: int = 200, headers: dict[str, str] | None = None
    ) -> HTTPResponse:
        """A whole answer of any type."""
        self.status = status
        made = {**self.all_headers, **(headers or {})}
        return HTTPResponse(body, status=status, headers=made, content_type=content_type)

    async def answer(self, response: HTTPResponse) -> None:
        """Send a whole answer now: one that a handler gives back waits until all that its request held is freed."""
        made: Any = await self.request.respond(response)
        self.has_begun = True
        await made.send(end_stream=True)

    @property
    def all_headers(self) -> dict[str, str]:
        own = {"X-Request-ID": self.request_id, "X-Trace-ID": self.trace_id, "Cache-Control": "no-store"}
        return {**own, **self._cors, **self.headers}

    @property
    def _cors(self) -> dict[str, str]:
        return cors_headers(self.service.deployment.api.cors_origins, self.request.headers.get("origin"))

    async def write(self, data: bytes | memoryview, content_type: str, limit_s: float | None = None) -> None:
        """Send some bytes of a streamed answer, headers first. Raises Stalled when the client does not read them."""
        if len(data) <= PART_BYTES:
            await self._write(data, content_type, limit_s)
            return
        whole = memoryview(data)
        for start in range(0, len(whole), PART_BYTES):
            await self._write(whole[start : start + PART_BYTES], content_type, limit_s)

    async def _write(self, data: bytes | memoryview, content_type: str, limit_s: float | None) -> None:
        if self._body is None or not data or not self._body.write(data):
            await self._send(bytes(data), content_type, limit_s)
        if len(data) >= LARGE_BYTES:
            await asyncio.sleep(0)  # a write that need not wait would let one stream starve the others

    async def _send(self, data: bytes, content_type: str, limit_s: float | None) -> None:
        if self._stream is None:
            self._stream = await self.request.respond(status=200, headers=self.all_headers, content_type=content_type)
        self.flush()
        is_head = not self.has_begun
        self.has_begun = True
        stall_s = self.service.deployment.api.stall_timeout_s
        try:
            async with asyncio.timeout(stall_s if limit_s is None else min(stall_s, max(0.001, limit_s))):
                await self._stream.send(data)
        except TimeoutError:
            raise Stalled("the client does not read its answer", hint=f"nothing was taken for {stall_s:g} s") from None
        if is_head:
            self._body = ChunkedBody.begun(self.request, self.service.burst)

    async def end(self) -> None:
        """End a streamed answer well."""
        self.flush()
        await self._stream.eof()

    def flush(self) -> None:
        """Write what the body holds back for the loop's next turn."""
        if self._body is not None:
            self._body.flush()

    def abort(self, *, drops: bool = False) -> None:
        """Cut the connection, so that nobody takes a part for the whole.

        drops: with what the kernel still holds for the client. One that does not read would else keep megabytes of the
        server's memory for minutes, and never learn that it was cut.
        """
        transport: Any = self.request.transport
        if transport is None or transport.is_closing():
            return
        self.flush()
        if drops:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        transport.abort()

    async def read(self) -> bytes | None:
        """Some bytes of the body, None at its end. Raises RequestError for broken framing, TooLarge, Overloaded."""
        stream: Any = self.request.stream
        try:
            piece: bytes | None = await stream.read() if stream is not None else None
        except PayloadTooLarge:
            raise TooLarge(f"the body has more than {self.limits.body} bytes", code="body_too_large") from None
        except BadRequest:
            raise RequestError("the body is not framed as HTTP", code="bad_request") from None
        if piece is not None:
            self.service.held.take(len(piece))
            self.held_bytes += len(piece)
        if piece is None:
            self._listen()
        return piece

    async def whole_body(self, most: int, room: int) -> bytearray | None:
        """All of the body behind `room` bytes, where its length is told and at most `most`; else None, and nothing is
        read. Raises SlowUpload, Overloaded.
        """
        body = WholeBody.of(self.request, min(most, self.limits.body), room, self._hold)
        if body is None:
            return None
        if not await body.receive(FLOOR_BYTES_PER_S * FLOOR_WINDOW_S, FLOOR_WINDOW_S):
            raise too_slow()
        await self.read()  # the end, which Sanic wants to have been asked for
        return body.data

    def _hold(self, size: int) -> None:
        self.service.held.take(size)
        self.held_bytes += size

    def _listen(self) -> None:
        # Sanic stops reading while 64 KiB of a body wait and goes on only for more of it. Without this a client that
        # sent a large body and left would never be noticed: its end of the connection is what is read next.
        transport: Any = self.request.transport
        if transport is not None and not transport.is_closing():
            transport.resume_reading()

    async def skip(self) -> None:
        """Read a body that means nothing here to its end: Sanic logs an error when a good answer leaves one over.

        Raises TooLarge, SlowUpload.
        """
        async for _ in read_pieces(self, SKIPPED_BYTES):
            pass


def header_text(text: str) -> str:
    """Text that may stand in a header: printable ASCII, at most 1 KiB."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)[:1024]


def new_exchange(service: Service, request: Request, route: str, *, is_native: bool) -> Exchange:
    """The exchange of a request that just came; its id is the header's, or a new one. Raises nothing."""
    trace_id = trace_id_of(request.headers.get("traceparent"))
    return Exchange(service, request, route, new_request_id(), trace_id, is_native=is_native, started=service.clock())


def take_header_id(exchange: Exchange) -> None:
    """Use the id that the client sent as a header. Raises RequestError when it cannot be one."""
    value = exchange.request.headers.get("x-request-id")
    if value is not None:
        exchange.request_id = check_request_id(str(value), "X-Request-ID")
