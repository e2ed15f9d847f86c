"""The body of a streamed answer between its head and its end, written straight to the connection. Made by the exchange.

Sanic sends head and end. For each part between them its way costs a signal, five coroutines and a limit of time,
a third of what a chunk costs the api.
"""

from __future__ import annotations

from typing import Any

from sanic import Request
from sanic.exceptions import RequestCancelled


class ChunkedBody:
    """Parts of one body, framed as HTTP/1.1 does. Owned by the exchange, from the head's last byte to `end`."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol

    @classmethod
    def begun(cls, request: Request) -> ChunkedBody | None:
        """The body of an answer whose head is out; None where Sanic sends it in another form than in chunks."""
        http: Any = request.stream
        is_chunked = http is not None and http.response_func == http.http1_response_chunked
        return cls(http.protocol) if is_chunked else None

    def write(self, data: bytes) -> bool:
        """Write a part that is not empty. False: nothing was written, the client has yet to take earlier ones.

        Raises RequestCancelled, which is a CancelledError, when the connection is closed.
        """
        protocol = self._protocol
        if not protocol._can_write.is_set():  # what Sanic itself waits for, cleared while 64 KiB wait for the socket
            return False
        transport = protocol.transport
        if transport is None or transport.is_closing():
            raise RequestCancelled
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True
