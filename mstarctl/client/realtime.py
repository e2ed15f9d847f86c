"""Connection to /v1/realtime. Used by `mstarctl talk` and by the conversations of the load test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from mstar_core.client import StreamError
from mstar_core.client.errors import UNREACHABLE, UnavailableError, error_of_response, unreachable
from mstar_core.errors import MstarError, TransportError

if TYPE_CHECKING:
    import ssl

    from websockets.asyncio.client import ClientConnection
    from websockets.exceptions import ConnectionClosed, InvalidStatus

Event = dict[str, Any]
Notice = Callable[[bool], None]
PATH: Final = "/v1/realtime"
RATE: Final = 24_000
"""Samples per second of `audio/pcm` in both directions, mono PCM16."""

OPEN_S: Final = 30.0
CLOSE_S: Final = 2.0
SERVER_FAILED: Final = 1011
"""Close code of a server that got no pong in time, which is a loss too."""

RETRIES_S: Final = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0)
"""Pauses before attempts to go on with a session, which the server keeps for 60 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealtimeAddress:
    """Address of a server. url: http or https, without /v1. socket: of a tunnel, in place of TCP. tls: for https."""

    url: str
    key: str | None = None
    tls: ssl.SSLContext | None = None
    socket: Path | None = None

    def of_model(self, model: str) -> str:
        """Return the WebSocket URL of a conversation with a model."""
        return self._path(f"model={quote(model, safe='')}")

    def of_session(self, session_id: str, after: str) -> str:
        """Return the WebSocket URL that goes on with a session. after: `event_id` of the last event, or 0."""
        return self._path(f"resume={quote(session_id, safe='')}&after={quote(after, safe='')}")

    def _path(self, query: str) -> str:
        parts = urlsplit(self.url)
        scheme = "wss" if parts.scheme == "https" else "ws"
        return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}{PATH}?{query}"


class RealtimeConnection:
    """One conversation. session: its fields as the server announced them. Valid inside the `conversation` block.

    A connection that is lost without a close frame is replaced if the caller wants that: `receive` connects again and
    returns the events that are missing, and `send` waits for it. What was sent in the moment of the loss may be lost.
    """

    def __init__(self, socket: ClientConnection, address: RealtimeAddress, notice: Notice | None) -> None:
        """notice: called with True for a loss, with False after it; None: a loss is an error."""
        self._socket, self._address, self._notice = socket, address, notice
        self._after = "0"
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._failure: MstarError | None = None
        self.session: dict[str, Any] = {}

    async def send(self, kind: str, **fields: Any) -> None:
        """Send one event. Raises TransportError."""
        from websockets.exceptions import ConnectionClosed

        while True:
            await self._is_open.wait()
            if self._failure is not None:
                raise self._failure
            socket = self._socket
            try:
                await socket.send(json.dumps({"type": kind, **fields}))
            except ConnectionClosed as closed:
                if not self._resumes(closed):
                    raise _closed(closed, self._address.url) from closed
                if socket is self._socket:
                    self._is_open.clear()  # `receive` notices the loss too
                continue
            return

    async def receive(self) -> Event:
        """Return the next event. Raises TransportError at the end of the connection."""
        from websockets.exceptions import ConnectionClosed

        while True:
            try:
                event: Event = json.loads(await self._socket.recv())
            except ConnectionClosed as closed:
                if not self._resumes(closed):
                    raise _closed(closed, self._address.url) from closed
                await self._resume(closed)
                continue
            self._after = str(event.get("event_id") or self._after)
            return event

    async def close(self) -> None:
        """Close the connection."""
        await self._socket.close()

    def _resumes(self, closed: ConnectionClosed) -> bool:
        """Return whether the server keeps the session: the connection broke, or it missed a pong."""
        is_lost = closed.rcvd is None or closed.rcvd.code == SERVER_FAILED
        return self._notice is not None and is_lost and bool(self.session)

    async def _resume(self, closed: ConnectionClosed) -> None:
        """Connect again within the time for which a server keeps a session. Raises TransportError."""
        assert self._notice is not None
        self._is_open.clear()
        self._notice(True)
        url = self._address.of_session(str(self.session["id"]), self._after)
        try:
            for pause_s in RETRIES_S:
                await asyncio.sleep(pause_s)
                try:
                    self._socket = await _connected(self._address, url)
                except UnavailableError as error:
                    if error.code != UNREACHABLE:
                        raise
                else:
                    self._notice(False)
                    return
            raise _closed(closed, self._address.url) from closed
        except MstarError as error:
            self._failure = error
            raise
        finally:
            self._is_open.set()

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
async def conversation(
    address: RealtimeAddress, model: str, notice: Notice | None = None
) -> AsyncIterator[RealtimeConnection]:
    """Open a conversation. Raises the error of a server that refuses it, and UnavailableError if nothing answers.

    notice: see `RealtimeConnection`.
    """
    connection = RealtimeConnection(await _connected(address, address.of_model(model)), address, notice)
    try:
        first = await connection.receive()
        if first["type"] == "error":
            raise error_of(first["error"])
        if first["type"] != "session.created":
            raise TransportError(f"{address.url} began with {first['type']}", "session.created was expected")
        connection.session = first["session"]
        yield connection
    finally:
        await connection.close()


async def _connected(address: RealtimeAddress, url: str) -> ClientConnection:
    from websockets.asyncio.client import connect, unix_connect
    from websockets.exceptions import InvalidHandshake, InvalidStatus

    options: dict[str, Any] = {"max_size": None, "open_timeout": OPEN_S, "close_timeout": CLOSE_S}
    if address.key is not None:
        options["additional_headers"] = {"Authorization": f"Bearer {address.key}"}
    if address.tls is not None:
        options["ssl"] = address.tls
    try:
        if address.socket is not None:
            return await unix_connect(str(address.socket), url, **options)
        return await connect(url, proxy=None, **options)
    except InvalidStatus as refused:
        raise _refusal(refused) from refused
    except InvalidHandshake as failed:
        raise TransportError(f"{address.url} does not open a WebSocket", str(failed), peer=address.url) from failed
    except (OSError, TimeoutError) as failed:
        raise unreachable(address.url, str(failed) or type(failed).__name__) from failed


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
