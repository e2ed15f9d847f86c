"""WebSocket connection of a route: handshake, messages, close. Created by the route's handler."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from sanic.exceptions import SanicException

from mstar_core.api.errors import Forbidden, Stalled, UpgradeRequired
from mstar_core.api.http.access import is_same_origin
from mstar_core.errors import RequestError

MESSAGE_BYTES: Final = 16 << 20
"""Message size limit; a longer message closes the connection with code 1009 before it is read completely."""

PING_S: Final = 20
"""Ping interval of an idle connection, and timeout of its pong."""

REASON_BYTES: Final = 120
"""A close frame holds at most 123 bytes of reason."""

NORMAL: Final = 1000
NO_CODE: Final = 1005
FAILED: Final = 1011
GOING_AWAY: Final = 1001


class WebSocket:
    """An open connection without compression. If the client closes it, the handler's task is cancelled."""

    def __init__(self, connection: Any, stall_s: float) -> None:
        self._connection = connection
        self._stall_s = stall_s

    @classmethod
    async def open(
        cls, request: Any, origins: Sequence[str], stall_s: float, protocols: Sequence[str] | None = None
    ) -> WebSocket:
        """Complete the handshake. Raises UpgradeRequired, Forbidden, RequestError, which are sent as plain HTTP.

        origins: of browsers that may connect. protocols: subprotocols to choose from, None for none.
        """
        check_handshake(request.headers, origins)
        try:
            connection = await request.transport.get_protocol().websocket_handshake(request, protocols)
        except SanicException as error:
            raise RequestError("the handshake is not valid for WebSocket 13", str(error), code="bad_request") from error
        return cls(connection, stall_s)

    async def receive(self) -> bytes | str:
        """Return the next message. Raises CancelledError if the client disconnected."""
        message: bytes | str | None = await self._connection.recv()
        if message is None:
            raise asyncio.CancelledError
        return message

    async def send(self, message: bytes | str) -> None:
        """Send a message. Raises Stalled if the client does not read."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self._connection.send(message)
        except TimeoutError:
            raise Stalled("the client does not read the response") from None

    @property
    def is_closed_by_client(self) -> bool:
        """Return whether the client has closed the connection by a close frame with the code 1000 or none."""
        received = self._connection.ws_proto.close_rcvd
        return received is not None and received.code in (NORMAL, NO_CODE)

    async def close(self, reason: str, code: int = NORMAL) -> None:
        """Close the connection within the stall timeout. Raises nothing if it is gone."""
        with suppress(TimeoutError, SanicException, OSError):
            async with asyncio.timeout(self._stall_s):
                await self._connection.close(code, reason.encode()[:REASON_BYTES].decode(errors="ignore"))

    async def fail(self, message: str, reason: str) -> None:
        """Send an error as text and close the connection, within the stall timeout."""
        async with asyncio.timeout(self._stall_s):
            await self._connection.send(message)
            await self._connection.close(FAILED, reason.encode()[:REASON_BYTES].decode(errors="ignore"))


def dismiss(connection: Any) -> None:
    """Send close code 1001 to a connection of the server, if it is a WebSocket. Raises nothing."""
    socket = getattr(connection, "websocket", None)
    if socket is not None:
        socket.fail_connection(GOING_AWAY)


def check_handshake(headers: Any, origins: Sequence[str]) -> None:
    """Check that a client may open a WebSocket: browsers only from the own pages and from the configured origins.

    CORS does not apply to WebSockets. The Origin header identifies browsers; other clients do not send one.
    """
    if str(headers.get("upgrade") or "").lower() != "websocket":
        raise UpgradeRequired(
            "this path accepts only WebSocket connections", hint="connect with ws://, or use POST /generate"
        )
    origin = headers.get("origin")
    if origin is not None and not is_same_origin(origin, headers) and origin not in origins and "*" not in origins:
        raise Forbidden("this origin may not connect", hint="allow it with --cors-origin")
