"""Connection to /v1/realtime. Used by `mstarctl talk` and by the conversations of the load test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from mstar_core.client import StreamError
from mstar_core.client.errors import error_of_response, unreachable
from mstar_core.errors import MstarError, TransportError

if TYPE_CHECKING:
    import ssl

    from websockets.asyncio.client import ClientConnection
    from websockets.exceptions import ConnectionClosed, InvalidStatus

Event = dict[str, Any]
PATH: Final = "/v1/realtime"
RATE: Final = 24_000
"""Samples per second of `audio/pcm` in both directions, mono PCM16."""

OPEN_S: Final = 30.0
CLOSE_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RealtimeAddress:
    """Address of a server. url: http or https, without /v1. socket: of a tunnel, in place of TCP. tls: for https."""

    url: str
    key: str | None = None
    tls: ssl.SSLContext | None = None
    socket: Path | None = None

    def of_model(self, model: str) -> str:
        """Return the WebSocket URL of a conversation with a model."""
        parts = urlsplit(self.url)
        scheme = "wss" if parts.scheme == "https" else "ws"
        return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}{PATH}?model={quote(model, safe='')}"


class RealtimeConnection:
    """One conversation. session: its fields as the server announced them. Valid inside the `conversation` block."""

    def __init__(self, socket: ClientConnection, url: str) -> None:
        self._socket, self._url = socket, url
        self.session: dict[str, Any] = {}

    async def send(self, kind: str, **fields: Any) -> None:
        """Send one event. Raises TransportError."""
        from websockets.exceptions import ConnectionClosed

        try:
            await self._socket.send(json.dumps({"type": kind, **fields}))
        except ConnectionClosed as closed:
            raise _closed(closed, self._url) from closed

    async def receive(self) -> Event:
        """Return the next event. Raises TransportError at the end of the connection."""
        from websockets.exceptions import ConnectionClosed

        try:
            event: Event = json.loads(await self._socket.recv())
        except ConnectionClosed as closed:
            raise _closed(closed, self._url) from closed
        return event

    async def configure(self, session: dict[str, Any]) -> None:
        """Change fields of the session. Raises the error of the server. Called before other events are awaited."""
        await self.send("session.update", session={"type": "realtime", **session})
        while True:
            event = await self.receive()
            if event["type"] == "error":
                raise error_of(event["error"])
            if event["type"] == "session.updated":
                self.session = event["session"]
                return


@asynccontextmanager
async def conversation(address: RealtimeAddress, model: str) -> AsyncIterator[RealtimeConnection]:
    """Open a conversation. Raises the error of a server that refuses it, and UnavailableError if nothing answers."""
    from websockets.asyncio.client import connect, unix_connect
    from websockets.exceptions import InvalidHandshake, InvalidStatus

    url = address.of_model(model)
    options: dict[str, Any] = {"max_size": None, "open_timeout": OPEN_S, "close_timeout": CLOSE_S}
    if address.key is not None:
        options["additional_headers"] = {"Authorization": f"Bearer {address.key}"}
    if address.tls is not None:
        options["ssl"] = address.tls
    try:
        if address.socket is not None:
            socket = await unix_connect(str(address.socket), url, **options)
        else:
            socket = await connect(url, proxy=None, **options)
    except InvalidStatus as refused:
        raise _refusal(refused) from refused
    except InvalidHandshake as failed:
        raise TransportError(f"{address.url} does not open a WebSocket", str(failed), peer=address.url) from failed
    except (OSError, TimeoutError) as failed:
        raise unreachable(address.url, str(failed) or type(failed).__name__) from failed
    try:
        connection = RealtimeConnection(socket, address.url)
        first = await connection.receive()
        if first["type"] != "session.created":
            raise TransportError(f"{address.url} began with {first['type']}", "session.created was expected")
        connection.session = first["session"]
        yield connection
    finally:
        await socket.close()


def error_of(stated: dict[str, Any]) -> MstarError:
    """Return the exception for an error object of an event or of a failed response."""
    is_wrong = stated.get("type") == "invalid_request_error"
    return StreamError(
        str(stated.get("message") or "the response failed"),
        status=400 if is_wrong else 500,
        code=stated.get("code"),
        param=stated.get("param"),
    )


def _refusal(refused: InvalidStatus) -> MstarError:
    import httpx

    response = refused.response
    if response.status_code == 200:
        return TransportError("the server does not open a WebSocket", f"{PATH} answered 200", peer=PATH)
    return error_of_response(
        httpx.Response(
            response.status_code, headers=list(response.headers.raw_items()), content=bytes(response.body or b"")
        )
    )


def _closed(closed: ConnectionClosed, url: str) -> TransportError:
    frame = closed.rcvd
    why = "" if frame is None else f"{frame.code} {frame.reason}".strip()
    return TransportError("the connection of the conversation closed", why, "see mstarctl logs for the cause", peer=url)
