"""A body of a told length, received right where it is read from. Made by the exchange.

Sanic's way costs six copies of a camera image, and for each 64 KiB that wait a turn of the loop.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

from sanic import Request


class WholeBody(asyncio.BufferedProtocol):
    """Stands in for Sanic's protocol while a body comes. Owned by the exchange, for the length of `receive`.

    data: `room` bytes that are the reader's, then the body. missing: bytes that have not come.
    """

    def __init__(self, http: Any, room: int) -> None:
        self._http = http
        self._sanic = http.protocol
        self._full: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.missing = int(http.request_bytes_left)
        self.data = bytearray(room + self.missing)
        with memoryview(http.recv_buffer) as come:
            self._place(come[: self.missing])
        del http.recv_buffer[: len(self.data) - room - self.missing]

    @classmethod
    def of(cls, request: Request, most: int, room: int) -> Self | None:
        """The body that a request still has; None where its length is not told, or more than `most`."""
        http: Any = request.stream
        if http is None or http.request_body is not True or http.expecting_continue:
            return None
        return cls(http, room) if 0 < http.request_bytes_left <= most else None

    def _place(self, come: memoryview) -> None:
        begin = len(self.data) - self.missing
        self.data[begin : begin + len(come)] = come
        self._count(len(come))

    def _count(self, size: int) -> None:
        self.missing -= size
        self._http.request_bytes_left = self.missing
        if not self.missing and not self._full.done():
            self._full.set_result(None)

    async def receive(self, floor_bytes: float, window_s: float) -> bool:
        """Wait for the rest. False: less than `floor_bytes` came within `window_s`."""
        transport = self._sanic.transport
        if not self.missing or transport is None or transport.is_closing():
            return not self.missing
        transport.set_protocol(self)
        transport.resume_reading()
        try:
            before = self.missing
            while not (await asyncio.wait({self._full}, timeout=window_s))[0]:
                if before - self.missing < floor_bytes:
                    return False
                before = self.missing
            return True
        finally:
            self._leave()

    def _leave(self) -> None:
        transport = self._sanic.transport
        if transport is not None and transport.get_protocol() is self:
            transport.set_protocol(self._sanic)

    # asyncio.BufferedProtocol

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: never beyond the body, which another request may follow."""
        return memoryview(self.data)[len(self.data) - self.missing :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many have come."""
        self._count(nbytes)
        if not self.missing:
            self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: Sanic ends the handler."""
        self._sanic.connection_lost(exc)

    def pause_writing(self) -> None:
        """Handed on."""
        self._sanic.pause_writing()

    def resume_writing(self) -> None:
        """Handed on."""
        self._sanic.resume_writing()
