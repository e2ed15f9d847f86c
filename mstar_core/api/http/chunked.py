"""The body of a streamed answer between its head and its end, written straight to the connection. Made by the exchange.

Sanic sends head and end. For each part between them its way costs a signal, five coroutines and a limit of time,
a third of what a chunk costs the api. Small parts of all streams are written back to back, a turn of the loop later: a
call of the socket between two steps of Python costs half as much again as one after another.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from sanic import Request
from sanic.exceptions import RequestCancelled

LARGE_BYTES: Final = 16 * 1024
"""A part of this size is written at once, and gives the others their turn."""

APART_BYTES: Final = 256 * 1024
"""A part of this size is written beside its frame: putting them together would copy it."""

log = logging.getLogger("mstar.api")


class WriteBatch:
    """Bodies with parts for the loop's next turn. One per api, owned by the service."""

    def __init__(self) -> None:
        self._bodies: list[ChunkedBody] = []

    def add(self, body: ChunkedBody) -> None:
        """Let a body write what it holds in the next turn."""
        if not self._bodies:
            asyncio.get_running_loop().call_soon(self._write)
        self._bodies.append(body)

    def _write(self) -> None:
        bodies, self._bodies = self._bodies, []
        for body in bodies:
            try:
                body.flush()
            except Exception:  # isolation boundary: one connection
                log.exception("a part of an answer could not be written")
                body.abort()


class ChunkedBody:
    """Parts of one body, framed as HTTP/1.1 does. Owned by the exchange, from the head's last byte to the end."""

    def __init__(self, protocol: Any, burst: WriteBatch) -> None:
        self._protocol = protocol
        self._burst = burst
        self._parts: list[bytes] = []

    @classmethod
    def begun(cls, request: Request, burst: WriteBatch) -> ChunkedBody | None:
        """The body of an answer whose head is out; None where Sanic sends it in another form than in chunks."""
        http: Any = request.stream
        is_chunked = http is not None and http.response_func == http.http1_response_chunked
        return cls(http.protocol, burst) if is_chunked else None

    def write(self, data: bytes | memoryview) -> bool:
        """Take a part that is not empty. False: it was not taken, the client has yet to take earlier ones.

        Raises RequestCancelled, which is a CancelledError, when the connection is closed.
        """
        protocol = self._protocol
        if not protocol._can_write.is_set():  # what Sanic itself waits for, cleared while 64 KiB wait for the socket
            return False
        if protocol.transport is None or protocol.transport.is_closing():
            raise RequestCancelled
        if len(data) >= APART_BYTES:
            self.flush()
            for part in (b"%x\r\n" % len(data), memoryview(data), b"\r\n"):
                protocol.transport.write(part)
            return True
        self._parts.append(b"".join((b"%x\r\n" % len(data), data, b"\r\n")))
        if len(data) >= LARGE_BYTES:
            self.flush()
        elif len(self._parts) == 1:
            self._burst.add(self)
        return True

    def flush(self) -> None:
        """Write what is held, before anything else is written or cut. Of a closed connection it is dropped."""
        parts, self._parts = self._parts, []
        transport = self._protocol.transport
        if parts and transport is not None and not transport.is_closing():
            transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def abort(self) -> None:
        """Cut the connection."""
        if self._protocol.transport is not None:
            self._protocol.transport.abort()
