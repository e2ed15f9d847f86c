"""A body of a told length, received right where it is read from. Made by the exchange.

Sanic's way costs six copies of a camera image, and for each 64 KiB that wait a turn of the loop. Memory for a long body
is taken as it comes, twice what has come at most: a length alone holds none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Self

from sanic import Request

FIRST_BYTES: Final = 1 << 20
"""Of a longer body, what it gets room for before any of it has come."""

ZEROS: Final = bytes(FIRST_BYTES)


class WholeBody(asyncio.BufferedProtocol):
    """Stands in for Sanic's protocol while a body comes. Owned by the exchange, for the length of `receive`.

    data: `room` bytes that are the reader's, then the body. missing: bytes that have not come. take: told of each piece
    of memory before it is taken; what it raises ends the body.
    """

    def __init__(self, http: Any, room: int, take: Callable[[int], None] = lambda size: None) -> None:
        self._http = http
        self._take = take
        self._sanic = http.protocol
        self._full: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watcher: asyncio.TimerHandle | None = None
        self._is_slow = False
        self.missing = int(http.request_bytes_left)
        first = min(self.missing, max(FIRST_BYTES, len(http.recv_buffer)))
        take(first)
        self.data = bytearray(room + first)
        self._end = room  # of what has come
        with memoryview(http.recv_buffer) as come:
            self._place(come[: self.missing])
        del http.recv_buffer[: self._end - room]

    @classmethod
    def of(cls, request: Request, most: int, room: int, take: Callable[[int], None]) -> Self | None:
        """The body that a request still has; None where its length is not told, or more than `most`.

        Raises what `take` does.
        """
        http: Any = request.stream
        if http is None or http.request_body is not True or http.expecting_continue:
            return None
        return cls(http, room, take) if 0 < http.request_bytes_left <= most else None

    def _place(self, come: memoryview) -> None:
        self.data[self._end : self._end + len(come)] = come
        self._count(len(come))

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
        """Wait for the rest. False: less than `floor_bytes` came within `window_s`. Raises what `take` does."""
        if self._full.done():
            self._full.result()
        transport = self._sanic.transport
        if not self.missing or transport is None or transport.is_closing():
            return not self.missing
        transport.set_protocol(self)
        transport.resume_reading()
        self._watch(floor_bytes, window_s)
        try:
            await self._full  # by itself: a wait with a limit takes a turn of the loop more
            return not self._is_slow
        finally:
            if self._watcher is not None:
                self._watcher.cancel()
            self._leave()

    def _watch(self, floor_bytes: float, window_s: float) -> None:
        def look(before: int) -> None:
            if self._full.done():
                return
            if before - self.missing < floor_bytes:
                self._is_slow = True
                self._full.set_result(None)
            else:
                self._watch(floor_bytes, window_s)

        self._watcher = asyncio.get_running_loop().call_later(window_s, look, self.missing)

    def _leave(self) -> None:
        transport = self._sanic.transport
        if transport is not None and transport.get_protocol() is self:
            transport.set_protocol(self._sanic)

    # asyncio.BufferedProtocol

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: never beyond the body, which another request may follow."""
        if self._end == len(self.data):  # only here does nobody hold a view of it
            try:
                self._grow()
            except Exception as error:  # noqa: BLE001  told to whoever waits, not to the connection
                if not self._full.done():
                    self._full.set_exception(error)
                return memoryview(bytearray(1))  # a byte has to be read, and nobody wants it any more
        return memoryview(self.data)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many have come."""
        self._count(nbytes)
        if self._full.done():
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
