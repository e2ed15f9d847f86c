"""HTTP/1 connection: strict framing, a time limit of request heads, and whether it is idle. Made by `listener`.

Like `sanic_protocol`, written for one release of Sanic.
"""

from __future__ import annotations

import asyncio
import string
from collections.abc import Sequence
from http import HTTPStatus
from time import monotonic
from typing import Any, Final

from sanic import Sanic
from sanic.exceptions import BadRequest, PayloadTooLarge, RequestTimeout
from sanic.http import Http, Stage
from sanic.server.protocols.websocket_protocol import WebSocketProtocol

from mstar_core.api.handover.keeper import KeptConnection
from mstar_core.api.handover.transport import RecordedTransport
from mstar_core.api.http.head import BadHead, checked_head

HEAD_S: Final = 10.0
"""Time limit of a request head, and of the first byte on a new connection."""

HEAD_END: Final = b"\r\n\r\n"
CHUNK_DIGITS: Final = 16
HEX: Final = frozenset(string.hexdigits)
DIGITS: Final = frozenset(string.digits)
STATUS_LINES: Final = {
    **{status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus},
    499: b"HTTP/1.1 499 Client Closed Request\r\n",
}


def has_no_body(status: int) -> bool:
    """Return whether responses of a final status have no body."""
    return status in (204, 304)


class InvalidHead(BadRequest):
    """An invalid request head. Its message is sent to the client."""


class StrictHttp(Http):
    """Request and response cycle of a connection, strict about framing (RFC 9112)."""

    __slots__ = ()
    head_s = HEAD_S
    protocol: Any
    request_body: Any
    response_func: Any

    async def http1_request_header(self) -> None:
        """Receive and check a request head. Raises BadRequest, PayloadTooLarge, RequestTimeout."""
        buffer, end = self.recv_buffer, self.recv_buffer.find(HEAD_END)
        self.protocol.await_request(len(buffer))
        if end < 0:
            try:
                async with asyncio.timeout(self.head_s):  # data that trickles in does not extend it
                    end = await self._rest_of_head()
            except TimeoutError:
                raise RequestTimeout("the request head arrived too slowly") from None
        if 0 <= end < self.HEADER_MAX_SIZE:
            try:
                buffer[:end] = checked_head(bytes(buffer[:end]))
            except BadHead as error:
                raise PayloadTooLarge(str(error)) if error.status == 413 else InvalidHead(str(error)) from None
        await super().http1_request_header()  # type: ignore[no-untyped-call]
        self.protocol.has_served = True
        if self.request.version == "1.0" or self.protocol.has_continue:
            self.expecting_continue = False  # an older client does not know 100 Continue

    async def _rest_of_head(self) -> int:
        buffer, seen = self.recv_buffer, 0
        while len(buffer) < self.HEADER_MAX_SIZE:
            await self._receive_more()
            end: int = buffer.find(HEAD_END, max(0, seen - 3))
            if end >= 0:
                return end
            seen = len(buffer)
        return -1

    def create_empty_request(self) -> None:
        """Create the request of an error response. The target of an invalid request may be unusable."""
        self.url = None
        super().create_empty_request()

    async def read(self) -> bytes | None:
        """Return some bytes of the body. Checks what Sanic skips: that each chunk ends with CRLF."""
        if self.request_body == "chunked" and self.request_bytes_left == 0 and not self.expecting_continue:
            buffer = self.recv_buffer
            while len(buffer) < 2:
                await self._receive_more()
            if buffer[:2] != b"\r\n":
                self.keep_alive = False
                raise BadRequest("Bad chunked encoding")
        if self.expecting_continue:
            self.protocol.continues_request()
        data: bytes | None = await super().read()
        return data

    async def http1_response_header(self, data: bytes, end_stream: bool) -> None:
        """Send the head of a response. A body of unknown length is chunked; for HTTP/1.0 it ends with the connection.

        Raises RuntimeError for an interim status.
        """
        response: Any = self.response
        headers = response.headers
        if not data and getattr(response, "body", None):
            data, end_stream = response.body, True
        if not isinstance(response.status, int) or response.status < 200:
            raise RuntimeError(f"{response.status!r} is not a final status")
        self.response_size = len(data)
        data = self._frame(data, end_stream)
        headers["connection"] = "keep-alive" if self.keep_alive else "close"
        lines = [STATUS_LINES.get(response.status) or b"HTTP/1.1 %d \r\n" % response.status]
        lines += [b"%b: %b\r\n" % header for header in response.processed_headers]
        if self.expecting_continue:
            self.expecting_continue = False
            if response.status != 417:
                lines.insert(0, b"HTTP/1.1 100 Continue\r\n\r\n")
        is_whole = end_stream or has_no_body(response.status)
        if is_whole:
            self.notes_end()
        await self._send(b"".join((*lines, b"\r\n", data)))
        self.stage = Stage.IDLE if is_whole else Stage.RESPONSE

    async def http1_response_chunked(self, data: bytes, end_stream: bool) -> None:
        """Send a part of a chunked body."""
        if end_stream:
            self.notes_end()
        await super().http1_response_chunked(data, end_stream)

    async def http1_response_normal(self, data: bytes, end_stream: bool) -> None:
        """Send a part of a body of known length."""
        if len(data) == self.response_bytes_left:
            self.notes_end()
        await super().http1_response_normal(data, end_stream)

    def notes_end(self) -> bool:
        """Record that the part that is recorded next ends the response. Returns False if it cannot.

        Sanic still reads the rest of a body that was not used.
        """
        if self.request_body:
            return False
        self.protocol.ends_response(len(self.recv_buffer), is_closing=not self.keep_alive)
        return True

    def _frame(self, data: bytes, end_stream: bool) -> bytes:
        """Choose the framing of the body. Returns its first bytes as they are sent."""
        headers = self.response.headers
        self.response_func = None
        if has_no_body(self.response.status):
            headers.pop("content-length", None)
            return b""
        if not (self.head_only and "content-length" in headers):
            if end_stream:
                headers["content-length"] = len(data)
            elif "content-length" in headers:
                self.response_bytes_left = int(headers["content-length"]) - len(data)
                self.response_func = self.http1_response_normal
            elif self.request.version == "1.0":
                self.keep_alive = False
                self.response_func = self._until_close
            else:
                headers["transfer-encoding"] = "chunked"
                data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
                self.response_func = self.http1_response_chunked
        if self.head_only:
            self.response_func = self.head_response_ignored
            return b""
        return data

    async def _until_close(self, data: bytes, end_stream: bool) -> None:
        if data:
            await self._send(data)
        if end_stream:
            self.response_func = None
            self.stage = Stage.IDLE

    @staticmethod
    def _safe_int(value: str, base: int = 10) -> int:
        """Return a length of a body or of a chunk, without signs, spaces and digits of other scripts."""
        if not value or not set(value) <= (HEX if base == 16 else DIGITS):
            raise ValueError(value)
        if len(value.lstrip("0")) > CHUNK_DIGITS:
            return 1 << 62  # over every limit
        return int(value, base)


class Connection(WebSocketProtocol):
    """One connection of the api. has_served: a request head was received on it.

    kept: the copy that the supervisor has, None if the connection ends with this process. continues: the next request
    was begun by another process, which recorded it.
    """

    HTTP_CLASS = StrictHttp
    __slots__ = ("continues", "has_served", "kept")

    def __init__(
        self,
        app: Sanic[Any, Any],
        connections: set[Any],
        state: dict[str, Any],
        kept: KeptConnection | None = None,
    ) -> None:
        super().__init__(
            loop=asyncio.get_running_loop(),
            app=app,
            connections=connections,
            state=state,
            websocket_max_size=app.config.WEBSOCKET_MAX_SIZE,
            websocket_ping_interval=app.config.WEBSOCKET_PING_INTERVAL,
            websocket_ping_timeout=app.config.WEBSOCKET_PING_TIMEOUT,
        )
        self.has_served = False
        self.continues = False
        self.kept = kept

    def connection_made(self, transport: Any) -> None:
        """Start to serve."""
        if self.kept is not None:
            transport = RecordedTransport(transport, self.kept.recording)
        super().connection_made(transport)  # type: ignore[no-untyped-call]

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the handler, and end the copy of the connection."""
        super().connection_lost(exc)  # type: ignore[no-untyped-call]
        if self.kept is not None:
            self.kept.end()

    def data_received(self, data: bytes) -> None:
        """Record and handle received bytes."""
        self.record(data)
        super().data_received(data)  # type: ignore[no-untyped-call]

    def go_on(self, rest: bytes) -> None:
        """Go on where another process was killed. rest: recorded bytes that it did not send."""
        assert self.kept is not None and isinstance(self.transport, RecordedTransport)
        recording = self.kept.recording
        self.transport.write_recorded(rest)
        if recording.record.is_closing:
            self.transport.close()
            return
        self.has_served = True
        if recording.record.is_active:
            self.continues = True
            if recording.record.total > recording.record.start:
                self.transport.mute()
        if recording.record.request_bytes:
            super().data_received(recording.request())  # type: ignore[no-untyped-call]

    def record(self, data: bytes | memoryview) -> None:
        """Record received bytes of a request."""
        if self.kept is not None:
            self.kept.recording.received(data)

    def await_request(self, unread: int) -> None:
        """Record that no request is in progress. unread: received bytes of the next one."""
        if self.kept is not None and not self.continues:
            self.kept.recording.await_request(unread)

    @property
    def has_continue(self) -> bool:
        """Whether another process has sent the interim response of the request that is continued."""
        return self.kept is not None and self.continues and self.kept.recording.record.has_continue

    def continues_request(self) -> None:
        """Record that the next write is the interim response, which asks for the body of the request."""
        if self.kept is not None:
            self.kept.recording.continues()

    def ends_response(self, unread: int, *, is_closing: bool) -> None:
        """Record that the part that is recorded next ends a response. unread: received bytes of the next request.

        is_closing: the connection ends with it.
        """
        if self.kept is not None:
            self.kept.recording.ends(unread, is_closing=is_closing)

    def write_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write several parts without joining them."""
        transport: Any = self.transport
        if isinstance(transport, RecordedTransport):
            transport.writelines(parts)
            return
        for part in parts:
            transport.write(part)

    async def websocket_handshake(self, request: Any, subprotocols: Any = None) -> Any:
        """Complete the handshake. A WebSocket ends with this process."""
        if self.kept is not None:
            self.kept.release()
        return await super().websocket_handshake(request, subprotocols)

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress: none has begun, or only a part of a head has arrived."""
        http: Any = self.http
        return self.websocket is None and http is not None and http.stage in (Stage.IDLE, Stage.REQUEST)

    @property
    def idle_since(self) -> float:
        """Monotonic time of the last data in either direction."""
        return float(self._time)

    def drop(self) -> None:
        """Close the connection at once. Its handler is cancelled in the next turn of the loop."""
        if self.transport is not None:
            self.transport.abort()  # Sanic's abort() forgets the transport, which its own cancellation then needs

    def check_timeouts(self) -> None:
        """Close a new connection on which no request begins; Sanic allows it the keep-alive time."""
        http: Any = self.http
        is_new = not self.has_served and http is not None and http.stage is Stage.IDLE
        if is_new and self._task and monotonic() - self._time > HEAD_S:
            self._task.cancel()
            return
        super().check_timeouts()  # type: ignore[no-untyped-call]
