"""WebSocket /v1/realtime: conversations in text and sound. POST /v1/realtime/client_secrets: keys for browsers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from sanic.response import HTTPResponse

from mstar_core.api.exchange import Exchange
from mstar_core.api.http.access import check_key, key_of
from mstar_core.api.http.client_secrets import ClientSecret
from mstar_core.api.http.websocket import WebSocket, check_handshake
from mstar_core.api.realtime.history import new_id
from mstar_core.api.realtime.session import RealtimeSession
from mstar_core.api.realtime.webrtc.ice_servers import ice_servers
from mstar_core.api.realtime.wire.server_events import EVENT_ID
from mstar_core.api.realtime.wire.session_fields import SessionState
from mstar_core.api.routes.fields import check_name, read_body
from mstar_core.api.schema import ClientSecretAnswer, ClientSecretRequest
from mstar_core.errors import RequestError, did_you_mean

PROTOCOL: Final = "realtime"
"""Subprotocol of browsers, which cannot send headers."""

KEY_PROTOCOL: Final = "openai-insecure-api-key."
"""Begin of the subprotocol that holds the key of a browser."""

QUERY: Final = ("model", "resume", "after")
DIGITS: Final = 18
SECRET_S: Final = 600.0
"""Seconds for which a client secret is valid, unless its request says otherwise."""


async def realtime(exchange: Exchange) -> HTTPResponse | None:
    """Serve one connection. Refusals before the handshake are plain HTTP responses."""
    service, limits = exchange.service, exchange.limits
    secret = authorize(exchange)
    problem = service.link.deployment.problem()
    if problem is not None:
        raise problem
    query = _query(exchange)
    check_name(exchange, query.get("model"))
    if "resume" not in query:
        service.sessions.check_room()  # before the handshake's check: pages ask for this reason by a plain request
    check_handshake(exchange.request.headers, limits.cors_origins)
    session = _resumed(exchange, query) if "resume" in query else None
    is_new = session is None
    if session is None:
        session = RealtimeSession(exchange, {} if secret is None else secret.session)
        service.sessions.add(session)  # before the handshake, so that a full house is an HTTP response
    protocols = [PROTOCOL] if PROTOCOL in _protocols(exchange) else None
    try:
        socket = await WebSocket.open(exchange.request, limits.cors_origins, limits.stall_timeout_s, protocols)
    except BaseException:
        if is_new:
            service.sessions.end(session.id)
        raise
    exchange.has_begun = True
    service.sessions.join(session)
    if await session.serve(exchange, socket):
        service.sessions.end(session.id)
    elif not session.is_connected:
        service.sessions.leave(session)
    return None


def _resumed(exchange: Exchange, query: Mapping[str, str]) -> RealtimeSession:
    """Return the session that a connection goes on with, behind the last event that its client has."""
    session = exchange.service.sessions.find(query["resume"], exchange.key)
    assert isinstance(session, RealtimeSession)
    number = query.get("after", "0").removeprefix(EVENT_ID)
    if not number.isascii() or not number.isdigit() or len(number) > DIGITS:
        raise RequestError(
            f"after is {query['after'][:40]!r}",
            hint="send the event_id of the last event, or its number",
            field="after",
        )
    session.sent.rewind(int(number))
    return session


def authorize(exchange: Exchange) -> ClientSecret | None:
    """Check the key, which may be a client secret; browsers send it as a subprotocol. Raises Unauthorized."""
    service, api = exchange.service, exchange.limits
    headers: Mapping[str, str] = exchange.request.headers
    sent = key_of(headers)
    for name in _protocols(exchange):
        sent = sent or (name.removeprefix(KEY_PROTOCOL) if name.startswith(KEY_PROTOCOL) else "")
    secret = service.client_secrets.find(sent)
    exchange.key = secret.key if secret is not None else check_key(api.api_keys, {"x-api-key": sent})
    return secret


def _protocols(exchange: Exchange) -> list[str]:
    sent = exchange.header("sec-websocket-protocol") or ""
    return [name.strip() for name in sent.split(",")]


def _query(exchange: Exchange) -> dict[str, str]:
    query: Mapping[str, list[str]] = exchange.request.get_args(keep_blank_values=True)
    for name, values in query.items():
        if name not in QUERY:
            raise RequestError(
                f"{name[:40]} is not a parameter of this path",
                hint=did_you_mean(name, QUERY),
                field=name[:40],
                code="unknown_parameter",
            )
        if len(values) > 1:
            raise RequestError(f"{name} is given more than once", hint="send it once", field=name)
    if "after" in query and "resume" not in query:
        raise RequestError("after needs resume", hint="send the id of the session", field="after")
    return {name: values[0] for name, values in query.items()}


async def client_secret(exchange: Exchange) -> HTTPResponse:
    """Create a key that opens sessions for a short time."""
    body, rest = await read_body(exchange, ClientSecretRequest)
    for name in rest:
        raise RequestError(f"{name[:40]} does not exist", hint="omit it", field=name[:40], code="unknown_parameter")
    state = SessionState(exchange)
    session = body.session or {}
    state.update(session)
    seconds = body.expires_after.seconds if body.expires_after is not None else SECRET_S
    value, secret = exchange.service.client_secrets.create(exchange.key, seconds, session)
    shown = {**state.shown, "id": new_id("sess"), "object": "realtime.session"}
    servers = ice_servers(exchange.limits, secret.expires + exchange.limits.realtime_max_s)
    return exchange.json(
        ClientSecretAnswer(
            value=value, expires_at=int(secret.expires), session=shown, ice_servers=servers or msgspec.UNSET
        )
    )
