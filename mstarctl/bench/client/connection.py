"""HTTP/1.1 connections of the load client. The receiving callback takes the time of each read.

httptools parses; a saturated client would take times late, so results contain the client's CPU time.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Final, cast

import httptools

from mstarctl.bench.client.wire import ServerAddress

WITHOUT_LENGTH: Final = "the connection closed before the answer was complete"


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and its answer. Owned by the load client; `over` is set at its end. Times: monotonic nanoseconds.

    retry_after_s: time that the server asked to wait before the next request, negative without one.
    """

    over: asyncio.Future[None]
    sent_ns: int = 0
    headers_ns: int = 0
    end_ns: int = 0
    status: int = 0
    error: str = ""
    detail: str = ""
    is_reused: bool = False
    content_type: str = ""
    retry_after_s: float = -1.0
    marks: list[tuple[int, int]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)

    def end(self, error: str = "", detail: str = "") -> None:
        """Record the outcome. Later calls have no effect."""
        if not self.over.done():
            self.end_ns = time.monotonic_ns()
            self.error, self.detail = error, detail
            self.over.set_result(None)


class Connection(asyncio.Protocol):
    """One connection, used by one exchange at a time. Owned by its pool."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._now = 0
        self._keeps = True
        self._has_length = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it

    def send(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        """Write a request. The head contains the length of the body."""
        assert self._transport is not None
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._keeps, self._has_length = True, False
        self._transport.writelines((head, body))

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Close without waiting, which cancels a running request at the server."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic_ns()
        exchange = self._exchange
        if exchange is None:
            self.abort()  # bytes without a request
            return
        before = len(exchange.body)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort()
            exchange.end("transport", f"invalid HTTP: {error}")
            return
        if len(exchange.body) > before:
            exchange.marks.append((len(exchange.body), self._now))
        if self._exchange is None and not exchange.over.done():  # on_message_complete was called
            exchange.end()
            if self._keeps and self.is_open:
                self._pool.give_back(self)
            else:
                self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if self._exchange is not None and name == b"content-type":
            self._exchange.content_type = value.decode("latin-1")
        elif self._exchange is not None and name == b"retry-after":
            self._exchange.retry_after_s = retry_after_s(value.decode("latin-1"), time.time())
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.headers_ns = self._now
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.body += body

    def on_message_complete(self) -> None:
        if self._exchange is not None and self._exchange.status >= 200:
            self._keeps = self._parser.should_keep_alive()
            self._exchange = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        is_whole = exchange.status and not self._has_length
        exchange.end("" if is_whole else "transport", "" if is_whole else str(exc) if exc else WITHOUT_LENGTH)


def retry_after_s(text: str, now_s: float) -> float:
    """Return the seconds of a Retry-After field, which is a number or a date; negative if it is neither.

    now_s: the time since the epoch. Source: RFC 9110, section 10.2.3.
    """
    with suppress(ValueError):
        return max(0.0, float(text)) if math.isfinite(float(text)) else -1.0
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - now_s)
    return -1.0


class ConnectionPool:
    """Open connections to one server, without a limit. Owned by the load client."""

    def __init__(self, server: ServerAddress) -> None:
        self._server = server
        self._idle: list[Connection] = []
        self._tls = _tls(server)

    async def send(self, exchange: Exchange, head: bytes, body: bytes) -> Connection:
        """Send a request on an idle connection, or on a new one. Raises OSError if none can be opened."""
        exchange.sent_ns = time.monotonic_ns()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                exchange.is_reused = True
                connection.send(exchange, head, body)
                return connection
        return await self.send_fresh(exchange, head, body)

    async def send_fresh(self, exchange: Exchange, head: bytes, body: bytes) -> Connection:
        """Send a request on a new connection. Raises OSError."""
        exchange.is_reused = False
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(
            lambda: Connection(self),
            self._server.address,
            self._server.port,
            ssl=self._tls,
            server_hostname=self._server.host if self._tls else None,
        )
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.send(exchange, head, body)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next request."""
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Remove a connection that was lost."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle[:]:
            connection.abort()
        self._idle.clear()


def _tls(server: ServerAddress) -> ssl.SSLContext | None:
    if not server.is_tls:
        return None
    context = ssl.create_default_context()
    if not server.is_verified:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
