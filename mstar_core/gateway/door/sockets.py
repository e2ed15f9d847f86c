"""WebSockets through the gateway: messages of both directions, pings and closes included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import aiohttp
from aiohttp import WSMsgType, web
from yarl import URL

from mstar_core.errors import MstarError, Unavailable
from mstar_core.gateway.door.ask import Ask
from mstar_core.gateway.door.headers import request_headers
from mstar_core.gateway.door.upstream import NOT_BEGUN
from mstar_core.gateway.parts import Replica

MESSAGE_BYTES: Final = 64 << 20
CLOSED: Final = (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR)
AWAY: Final = 1001
LOST: Final = 1011


class HandshakeRefused(MstarError):
    """The deployment refused a WebSocket."""

    code = "websocket_refused"


async def join(
    session: aiohttp.ClientSession,
    ask: Ask,
    replicas: Sequence[Replica],
    sent: Callable[[Replica], None],
    heard: Callable[[str], None],
    *,
    takes_keys: bool,
) -> web.StreamResponse:
    """Connect a client with the first replica that accepts it, and carry messages until one side closes.

    sent: called with each replica that is tried. heard: called with each text of the replica.
    Raises Unavailable if no replica is reached, HandshakeRefused with the status of the deployment.
    """
    upstream = await _connected(session, ask, replicas, sent, takes_keys=takes_keys)
    protocols = (upstream.protocol,) if upstream.protocol else ()
    client = web.WebSocketResponse(
        protocols=protocols, autoping=False, autoclose=False, compress=False, max_msg_size=MESSAGE_BYTES
    )
    try:
        await client.prepare(ask.request)
        tasks = {asyncio.create_task(_carry(client, upstream)), asyncio.create_task(_carry(upstream, client, heard))}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await asyncio.shield(_end(client, upstream))
    return client


async def _connected(
    session: aiohttp.ClientSession,
    ask: Ask,
    replicas: Sequence[Replica],
    sent: Callable[[Replica], None],
    *,
    takes_keys: bool,
) -> Any:
    names = ask.request.headers.get("Sec-WebSocket-Protocol", "")
    protocols = tuple(name.strip() for name in names.split(",") if name.strip())
    for replica in replicas:
        sent(replica)
        headers = request_headers(
            ask.request.headers, replica, ask.request_id, ask.peer, takes_keys=takes_keys, tenant=ask.tenant
        )
        try:
            socket = await session.ws_connect(
                URL(f"{replica.url}{ask.parts.raw}", encoded=True),
                headers=headers,
                protocols=protocols,
                autoping=False,
                autoclose=False,
                max_msg_size=MESSAGE_BYTES,
                ssl=not replica.is_local,
            )
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 503 and replica is not replicas[-1]:
                continue
            refused = HandshakeRefused(f"{replica.deployment} refused the connection", hint=str(error.message))
            refused.status = error.status if error.status >= 400 else 502
            raise refused from error
        except NOT_BEGUN as error:
            if replica is replicas[-1]:
                raise Unavailable(f"{replica.deployment} does not accept connections", hint="retry later") from error
            continue
        return socket
    raise Unavailable("no replica takes requests", hint="retry later")


async def _carry(source: Any, sink: Any, heard: Callable[[str], None] | None = None) -> None:
    """Send every message of one side to the other until it closes."""
    while True:
        message = await source.receive()
        match message.type:
            case WSMsgType.TEXT:
                if heard is not None:
                    heard(message.data)
                await sink.send_str(message.data)
            case WSMsgType.BINARY:
                await sink.send_bytes(message.data)
            case WSMsgType.PING:
                await sink.ping(message.data)
            case WSMsgType.PONG:
                await sink.pong(message.data)
            case _:
                code = message.data if message.type is WSMsgType.CLOSE else LOST
                await sink.close(code=_sendable(code), message=str(message.extra or "").encode()[:123])
                return


def _sendable(code: object) -> int:
    """Return a close code that may stand on the wire. Source: RFC 6455, section 7.4."""
    number = code if isinstance(code, int) else AWAY
    return number if 1000 <= number < 5000 and number not in (1004, 1005, 1006, 1015) else 1000


async def _end(client: Any, upstream: Any) -> None:
    """Close both sides; a side that is closed already stays so."""
    for side in (upstream, client):
        with suppress(ConnectionError, RuntimeError, aiohttp.ClientError):
            if not side.closed:
                await side.close(code=AWAY)
