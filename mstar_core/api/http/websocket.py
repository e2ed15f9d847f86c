"""One WebSocket connection of a route: opened, read, written and closed. Made by the route's handler."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from sanic.exceptions import SanicException

from mstar_core.api.errors import Forbidden, Stalled, UpgradeRequired
from mstar_core.api.http.exchange import Exchange
from mstar_core.errors import RequestError

MESSAGE_BYTES: Final = 16 << 20
"""Of one message; a longer one closes the connection with 1009 before it is read whole."""

PING_S: Final = 20
"""How often a quiet connection is asked whether it lives, and how long its answer may take."""

REASON_BYTES: Final = 120
"""A close frame has room for 123 bytes of reason."""

FAILED: Final = 1011
GOING_AWAY: Final = 1001


class WebSocket:
    """An open connection. Frames are uncompressed. A connection that the client closes cancels the handler's task."""

    def __init__(self, connection: Any, stall_s: float) -> None:
        self._connection = connection
        self._stall_s = stall_s

    @classmethod
    async def open(cls, exchange: Exchange) -> WebSocket:
        """Answer the handshake. Raises UpgradeRequired, Forbidden, RequestError; then plain HTTP can still be sent."""
        request: Any = exchange.request
        check_handshake(request.headers, exchange.service.deployment.api.cors_origins)
        try:
            connection = await request.transport.get_protocol().websocket_handshake(request)
        except SanicException as error:
            raise RequestError("the handshake is not one of WebSocket 13", str(error), code="bad_request") from error
        exchange.has_begun = True
        return cls(connection, exchange.service.deployment.api.stall_timeout_s)

    async def receive(self) -> bytes | str:
        """The next message. Raises CancelledError when the client has gone."""
        message: bytes | str | None = await self._connection.recv()
        if message is None:
            raise asyncio.CancelledError
        return message

    async def send(self, message: bytes | str) -> None:
        """Send one message. Raises Stalled when the client does not read."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self._connection.send(message)
        except TimeoutError:
            raise Stalled("the client does not read its answer") from None

    async def fail(self, message: str, reason: str) -> None:
        """Say what went wrong as a text, then close; at most as long as a write may take."""
        async with asyncio.timeout(self._stall_s):
            await self._connection.send(message)
            await self._connection.close(FAILED, reason.encode()[:REASON_BYTES].decode(errors="ignore"))


def dismiss(connection: Any) -> None:
    """Tell the client of a server's connection that the server goes (1001), if it is a WebSocket. Raises nothing."""
    socket = getattr(connection, "websocket", None)
    if socket is not None:
        socket.fail_connection(GOING_AWAY)


def check_handshake(headers: Any, origins: Sequence[str]) -> None:
    """Raise unless a client may open a WebSocket: browsers only from pages of the named origins.

    Browsers keep no page from opening one; what keeps a page out is its Origin, which robots' clients do not send.
    """
    if str(headers.get("upgrade") or "").lower() != "websocket":
        raise UpgradeRequired("this path takes WebSocket connections", hint="open it as ws://, or use POST /generate")
    origin = headers.get("origin")
    if origin is not None and origin not in origins and "*" not in origins:
        raise Forbidden("pages of this origin may not connect", hint="name it with --cors-origin")
