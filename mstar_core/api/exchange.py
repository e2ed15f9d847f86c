"""HTTP exchange: the request as every route sees it, and all ways to respond, server-sent events included."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from sanic import Request
from sanic.exceptions import BadRequest, PayloadTooLarge, RequestCancelled
from sanic.response import HTTPResponse

from mstar_core.api.errors import ErrorReply, Stalled, reply_of
from mstar_core.api.handover.delivery import Delivery
from mstar_core.api.handover.keeper import RESET
from mstar_core.api.handover.transport import RecordedTransport
from mstar_core.api.http.access import cors_headers
from mstar_core.api.http.body import FLOOR_BYTES_PER_S, FLOOR_WINDOW_S, SKIPPED_BYTES, read_pieces, too_slow
from mstar_core.api.http.sanic_protocol import LARGE_BYTES, LAST_CHUNK, ChunkedBody, WholeBody, framed
from mstar_core.api.output.kept_events import EVENTS, Data, Event, EventLog
from mstar_core.api.output.line_formats import BINARY, FRAMES, LINES, error_line, pieces
from mstar_core.api.parse.params import ParsedRequest
from mstar_core.api.requests.registry import check_request_id, new_request_id, trace_id_of, unescaped
from mstar_core.api.service import Service, Session
from mstar_core.config.resolved import ApiConfig
from mstar_core.errors import MstarError, RequestError, TooLarge
from mstar_core.plugin.params import parse_bool
from mstar_core.process.logs import REQUEST_ID, request_scope

JSON = "application/json; charset=utf-8"
DETACH: Final = "x-mstar-detach"
"""Header of a request that goes on without its connection."""

CACHE_SCOPE: Final = "x-mstar-cache-scope"
"""Header of a request that shares cached prefixes and media only with those of the same scope."""

UNREAD_S: Final = 2.0
"""Limit of the time for which a body is still read after its response has ended."""

PART_BYTES = 1 << 20
"""Size limit of one write. The transport copies whatever the socket does not accept, which blocks other streams."""

log = logging.getLogger("mstar.api")


@dataclass(slots=True)
class Exchange:
    """One request and its response. Owned by the app's wrapper; passed to the route's handler.

    trace_id: sent by the client, otherwise new. is_native: error bodies include the older key. has_begun: the first
    byte of the response was sent. message: the sentence of a failure, as the client gets it. held_bytes: bytes of the
    body reserved in the memory budget. created: seconds since the epoch. delivery: what the response holds so far, None
    if the connection ends with this process. events: numbers the events of a streamed response. events_type:
    content type of a response of events, empty for others. is_left: the client has gone, and the request goes on.
    on_failed: makes the events that end a failed stream; None: one with the error object.
    adapter: number of the LoRA adapter that the request names, 0 without one.
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
    created: float = 0.0
    delivery: Delivery | None = None
    events: EventLog = field(default_factory=EventLog)
    events_type: str = ""
    is_left: bool = False
    on_failed: Callable[[ErrorReply], list[Event]] | None = None
    status: int = 200
    adapter: int = 0
    code: str = "ok"
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    _stream: Any = None
    _body: ChunkedBody | None = None

    @property
    def limits(self) -> ApiConfig:
        return self.service.deployment.api

    @property
    def served_name(self) -> str:
        """Return the name of the model that answers: of the LoRA adapter, else of the deployment."""
        deployment = self.service.deployment
        return next((each.name for each in deployment.adapters if each.number == self.adapter), deployment.name)

    @property
    def content_type(self) -> str:
        return str(self.request.headers.get("content-type") or "")

    @property
    def path_name(self) -> str:
        """Return the `{name}` of the path with percent escapes decoded; clients may escape characters of an id."""
        return unescaped(str(self.request.match_info["name"]))

    @property
    def scope(self) -> str:
        """Return the name under which a client keeps its cached prefixes and media apart, empty without one."""
        return self.header(CACHE_SCOPE) or ""

    def open(self, call: ParsedRequest) -> AbstractAsyncContextManager[Session]:
        """Run the call of this exchange for the duration of the block. Raises as `Service.open` does."""
        return self.service.open(
            call,
            key=self.key,
            scope=self.scope,
            started=self.started,
            delivery=self.delivery,
            adapter=self.adapter,
        )

    def header(self, name: str) -> str | None:
        """Return a request header, None without it. name: lower case."""
        value = self.request.headers.get(name)
        return str(value) if value is not None else None

    def take_body_id(self, request_id: Any) -> None:
        """Use the client id of the body, which overrides the header. Raises RequestError."""
        if request_id is None:
            return
        if not isinstance(request_id, str):
            raise RequestError("request_id must be a string", field="request_id")
        self.request_id = check_request_id(request_id)
        REQUEST_ID.set(self.request_id)

    def check_open(self, count: int = 1) -> None:
        """Raise Unavailable, WorkerLost or Overloaded if this request, of so many items, would be refused."""
        is_continued = self.delivery is not None and self.delivery.is_continued
        self.service.check_open(self.key, count, is_continued=is_continued)

    def warn(self, warnings: Sequence[str]) -> None:
        """Add warnings to the response headers."""
        if warnings:
            self.headers["X-Mstar-Warnings"] = header_text("; ".join(warnings))

    def json(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> HTTPResponse:
        """Return a complete JSON response."""
        return self.whole(msgspec.json.encode(body), JSON, status, headers)

    def whole(
        self, body: bytes, content_type: str, status: int = 200, headers: dict[str, str] | None = None
    ) -> HTTPResponse:
        """Return a complete response."""
        self.status = status
        merged = {**self.all_headers, **(headers or {})}
        return HTTPResponse(body, status=status, headers=merged, content_type=content_type)

    async def answer(self, response: HTTPResponse) -> None:
        """Send a complete response now; a returned response is sent only after the request has freed everything."""
        stream: Any = await self.request.respond(response)
        self.has_begun = True
        await stream.send(end_stream=True)

    @property
    def all_headers(self) -> dict[str, str]:
        fixed = {
            "X-Request-ID": self.request_id,
            "X-Trace-ID": self.trace_id,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
        }
        return {**fixed, **cors_headers(self.limits.cors_origins, self.request.headers.get("origin")), **self.headers}

    def keep_events(self, content_type: str | None) -> None:
        """Keep the events of this request if its client asked for that, so that it outlives its connection.

        content_type: of the events; None for a response of another kind. Raises RequestError, Duplicate.
        """
        self.events_type = content_type or ""
        if self.delivery is not None:
            self.delivery.note_events(self.events_type)
        value, kept = self.header(DETACH), self.service.kept_events
        is_kept = False if value is None else parse_bool(value)
        if is_kept is None:
            raise RequestError("X-Mstar-Detach must be true or false", field="X-Mstar-Detach", allowed="true, false")
        if not is_kept:
            kept.forget(self.request_id, self.key)
        elif content_type is None:
            hint = "stream lines, frames or server-sent events, or omit the header"
            raise RequestError("X-Mstar-Detach needs a response of events", hint=hint, field="X-Mstar-Detach")
        else:
            kept.open(self.request_id, self.key, self.events, content_type)

    def leave(self) -> bool:
        """Go on without the client, whose connection is closed. Returns False if the request ends with it."""
        if self.events.is_kept:
            self.is_left, self._body = True, None
        return self.is_left

    def keep_failure(self, reply: ErrorReply) -> None:
        """Keep the error of a request that failed before its first event."""
        if self.events.is_kept:
            self.events.add(self.failed_events(self.events.content_type, reply))

    def failed_events(self, content_type: str, reply: ErrorReply) -> list[Event]:
        """Return the events that end a failed stream of a content type."""
        if self.on_failed is not None:
            return self.on_failed(reply)
        return [failed_event(content_type, reply, self.request_id)]

    async def fail_begun(self, reply: ErrorReply) -> bool:
        """End the events that another process has begun to send with an error. Returns False if there are none.

        For a request that fails before this process has written anything. Raises as `write`.
        """
        delivery, content_type = self.delivery, self.events_type
        if delivery is None or not delivery.is_begun or not content_type or self.has_begun:
            return False
        await self.fail(reply, content_type)
        return True

    async def fail(self, reply: ErrorReply, content_type: str) -> None:
        """End a streamed response of events with an error. Raises as `write`."""
        if self.delivery is not None:
            await self._pass_head(content_type, None)
            self.delivery.fail()
        await self.send(self.failed_events(content_type, reply), content_type, is_last=True)
        await self.end()

    async def send(
        self, events: Iterable[Event], content_type: str, limit_s: float | None = None, *, is_last: bool = False
    ) -> None:
        """Number and send events of a streamed response, as one part. is_last: `end` follows. Raises as `write`."""
        is_replay = self.delivery is not None and self.delivery.is_replay
        await self._send_part(
            list(pieces(self.events.add(events, is_replay=is_replay))), content_type, limit_s, is_last=is_last
        )

    async def keep_alive(self, data: bytes, content_type: str, limit_s: float | None = None) -> None:
        """Send a part that holds no output, but not while a replay catches up. Raises as `write`."""
        if self.delivery is not None:
            await self._pass_head(content_type, limit_s)
            if self.delivery.is_replay:
                return
        await self._write(data, content_type, limit_s)

    async def write(
        self, data: bytes | memoryview, content_type: str, limit_s: float | None = None, *, is_last: bool = False
    ) -> None:
        """Send a part of a streamed response, after the headers. is_last: `end` follows.

        Raises Stalled if the client does not read.
        """
        await self._send_part([data] if data else [], content_type, limit_s, is_last=is_last)

    async def _send_part(
        self, buffers: Sequence[Data], content_type: str, limit_s: float | None, *, is_last: bool
    ) -> None:
        """Send a part. A death leaves it out or, from its record, completes it; the last part ends the response."""
        slices = [piece for data in buffers for piece in _slices(data)]
        delivery, is_one_write = self.delivery, len(slices) == 1 and not is_last
        if delivery is not None:
            await self._pass_head(content_type, limit_s)
            if slices:
                if not is_one_write and not self.has_begun:
                    await self._write(b"", content_type, limit_s)  # the head, which no part holds
                self.flush()
                delivery.writes()
                if not is_one_write:
                    await self._record(slices, is_last=is_last)
        for piece in slices or [b""]:
            await self._write(piece, content_type, limit_s)
        if delivery is not None and slices:
            delivery.written()

    async def _pass_head(self, content_type: str, limit_s: float | None) -> None:
        """Repeat the head that another process has sent; it is dropped."""
        if self.delivery is not None and self.delivery.is_begun and not self.has_begun:
            await self._write(b"", content_type, limit_s)
            self.delivery.passed_head()

    async def _record(self, slices: Sequence[Data], *, is_last: bool) -> None:
        """Record a part of several writes, and with the last part the end of the response."""
        transport: Any = self.request.transport
        http: Any = self.request.stream
        if self.is_left or not isinstance(transport, RecordedTransport) or transport.is_muted:
            return
        data = list(slices)
        is_chunked, has_end = self._body is not None, is_last and http.notes_end()
        if is_chunked:
            data = [piece for each in slices for piece in framed(each)]
        if is_chunked and has_end:
            data.append(LAST_CHUNK)
        await transport.record(data)

    async def _write(self, data: bytes | memoryview, content_type: str, limit_s: float | None) -> None:
        transport: Any = self.request.transport
        if transport is None or transport.is_closing():
            self.leave()
        if self.is_left:
            self.has_begun = True
            return
        try:
            if self._body is None or not data or not self._body.write(data):
                await self._send(bytes(data), content_type, limit_s)
        except RequestCancelled:
            if not self.leave():
                raise
        if len(data) >= LARGE_BYTES:
            await asyncio.sleep(0)  # a write that never waits would starve other streams

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
            if self.leave():
                self.abort(drops=True)
                return
            raise Stalled("the client does not read the response", hint=f"nothing was read for {stall_s:g} s") from None
        if is_head:
            self._body = ChunkedBody.begun(self.request, self.service.burst)

    async def end(self) -> None:
        """End a streamed response."""
        if self.is_left:
            return
        self.flush()
        try:
            await self._stream.eof()
        except RequestCancelled:
            if not self.leave():
                raise

    def flush(self) -> None:
        """Write parts that are scheduled for the next loop iteration."""
        if self._body is not None:
            self._body.flush()

    def abort(self, *, drops: bool = False) -> None:
        """Abort the connection, so that the client does not mistake a partial response for a complete one.

        drops: also discard the kernel's send buffer. A client that does not read would otherwise hold megabytes of
        server memory for minutes, without noticing the abort. A client of HTTP/1.0 notices nothing else.
        """
        transport: Any = self.request.transport
        if transport is None or transport.is_closing():
            return
        self.flush()
        if drops or self.request.version == "1.0":
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        transport.abort()

    async def read(self) -> bytes | None:
        """Return some bytes of the body, None at its end. Raises RequestError for invalid framing, TooLarge,
        Overloaded.
        """
        stream: Any = self.request.stream
        most = self.limits.max_body_bytes
        if stream is not None and (stream.request_bytes or 0) > most:  # announced, or in chunks so far
            raise TooLarge(f"the body is larger than {most} bytes", code="body_too_large")
        try:
            piece: bytes | None = await stream.read() if stream is not None else None
        except PayloadTooLarge:
            raise TooLarge(f"the body is larger than {most} bytes", code="body_too_large") from None
        except BadRequest:
            raise RequestError("the body is not valid HTTP", code="bad_request") from None
        if piece is not None:
            self._hold(len(piece))
        else:
            self._listen()
        return piece

    async def whole_body(self, most: int) -> bytearray | None:
        """Return the whole body; None, without reading, if its length is unknown or exceeds `most`.

        Raises SlowUpload, Overloaded.
        """
        body = WholeBody.of(self.request, most, self._hold)
        if body is None:
            return None
        if not await body.receive(FLOOR_BYTES_PER_S * FLOOR_WINDOW_S, FLOOR_WINDOW_S):
            raise too_slow()
        await self.read()  # Sanic requires that the end is read
        return body.data

    async def drop_body(self) -> None:
        """Discard the rest of a body whose response has ended, and close the connection.

        For a moment it is still read, because closing a connection with unread bytes can cost the client the response.
        """
        try:
            async with asyncio.timeout(UNREAD_S):
                while await self.read() is not None:
                    pass
        except (TimeoutError, MstarError):
            pass
        finally:
            self.leave_body()

    def leave_body(self) -> None:
        """Read no more of the body. The connection ends with the response."""
        stream: Any = self.request.stream
        if stream is not None and stream.request_body:
            stream.request_body, stream.keep_alive = None, False

    def end_with_process(self) -> None:
        """Let the connection end with this process, because no other one can repeat the response."""
        transport: Any = self.request.transport
        connection: Any = transport.get_protocol() if transport is not None else None
        if connection is not None and connection.kept is not None:
            connection.kept.release()
            self.delivery = None

    def note(self, request_id: str, code: str, status: int, total_s: float, *, is_work: bool = True) -> None:
        """Count and log an answer. is_work: that of an inference request."""
        metrics = self.service.metrics
        metrics.requests.labels(self.route, code).inc()
        if is_work:
            metrics.request_s.labels(self.route).observe(total_s)
        with request_scope(request_id):
            facts = {"route": self.route, "status": status, "code": code, "total_ms": round(total_s * 1000, 3)}
            facts |= {"error": self.message} if self.message else {}
            level = logging.INFO if is_work else logging.DEBUG
            log.log(level, "answered", extra={"facts": {**facts, "trace": self.trace_id}})

    def _hold(self, size: int) -> None:
        self.service.held.take(size)
        self.held_bytes += size

    def _listen(self) -> None:
        # Sanic stops to read while 64 KiB of a body are buffered, and resumes only for more of the body. Without this
        # call, a disconnect after a large body would never be noticed.
        transport: Any = self.request.transport
        if transport is not None and not transport.is_closing():
            transport.resume_reading()

    async def skip(self) -> None:
        """Read an unused body to its end, because Sanic logs an error if a successful response leaves one unread.

        Raises TooLarge, SlowUpload.
        """
        async for _ in read_pieces(self, SKIPPED_BYTES):
            pass


def _slices(data: Data) -> Iterator[Data]:
    if len(data) <= PART_BYTES:
        yield data
        return
    whole = memoryview(data)
    for start in range(0, len(whole), PART_BYTES):
        yield whole[start : start + PART_BYTES]


def header_text(text: str) -> str:
    """Return text that is valid in a header: printable ASCII, at most 1 KiB."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)[:1024]


def new_exchange(service: Service, request: Request, route: str, *, is_native: bool) -> Exchange:
    """Create the exchange of a request, with a generated id, or with that of the process that began it.

    Raises nothing.
    """
    trace_id = trace_id_of(request.headers.get("traceparent"))
    exchange = Exchange(
        service,
        request,
        route,
        new_request_id(),
        trace_id,
        is_native=is_native,
        started=service.clock(),
        created=time.time(),
    )
    transport: Any = request.transport
    if isinstance(transport, RecordedTransport):
        _record(exchange, transport)
    return exchange


def _record(exchange: Exchange, transport: RecordedTransport) -> None:
    """Record a request for the next api, or take its facts from the record of the last one."""
    recording = transport.recording
    connection: Any = transport.get_protocol()
    record, is_continued = recording.record, connection.continues
    if is_continued:
        connection.continues = False
        exchange.request_id, exchange.trace_id = record.request_id, record.trace_id
        exchange.started, exchange.created = record.started, record.created
        exchange.events_type = record.events_type
    else:
        recording.begin(exchange.request_id, exchange.trace_id, exchange.started, exchange.created)
    exchange.delivery = Delivery(transport, exchange.flush, exchange.events, is_continued)


def take_header_id(exchange: Exchange) -> None:
    """Use the client id of the header. Raises RequestError."""
    value = exchange.request.headers.get("x-request-id")
    if value is not None:
        exchange.request_id = check_request_id(str(value), "X-Request-ID")


PING: Final = b": ping\n\n"
"""Comment that keeps the connection alive between outputs."""

DONE: Final = (b"data: [DONE]\n\n",)


def event(body: Any) -> tuple[bytes]:
    """Encode an event."""
    return (b"data: " + msgspec.json.encode(body) + b"\n\n",)


def failed_event(content_type: str, reply: ErrorReply, request_id: str) -> Event:
    """Return the event that ends a failed stream of a content type."""
    if content_type == EVENTS:
        return event(reply.body)
    return (error_line(BINARY if content_type == FRAMES else LINES, reply, request_id),)


@asynccontextmanager
async def streaming(exchange: Exchange, content_type: str = EVENTS) -> AsyncIterator[None]:
    """End the streamed body that the block writes. If it fails after its start, send an error event.

    A client that does not read gets no error; its connection is aborted.
    """
    try:
        yield
    except MstarError as error:
        if exchange.has_begun and error.code == "stalled":
            exchange.abort(drops=True)
        elif exchange.has_begun:
            await exchange.fail(reply_of(error, exchange.request_id), content_type)
        raise
    await exchange.end()
