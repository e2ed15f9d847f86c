"""POST /v1/realtime/calls: realtime sessions over WebRTC. POST /v1/realtime/calls/{id}/hangup ends one."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from sanic.response import HTTPResponse

from mstar_core.api.exchange import Exchange
from mstar_core.api.http.body import read_form, read_pieces
from mstar_core.api.http.strict_json import parse_object
from mstar_core.api.realtime.session import RealtimeSession
from mstar_core.api.realtime.webrtc.ice_servers import ice_servers
from mstar_core.api.routes.fields import check_name
from mstar_core.api.routes.realtime import authorize
from mstar_core.errors import NotFound, RequestError

if TYPE_CHECKING:
    from mstar_core.api.realtime.webrtc.call import RealtimeCall

SDP: Final = "application/sdp"
SDP_BYTES: Final = 256 << 10
EXTRA: Final = "mstarctl[webrtc]"

log = logging.getLogger("mstar.api.realtime")


async def realtime_call(exchange: Exchange) -> HTTPResponse:
    """Answer an offer, and serve the session behind it until the call ends."""
    if importlib.util.find_spec("aiortc") is None:
        raise NotFound(
            "this server has no WebRTC", hint=f"pip install '{EXTRA}', or use /v1/realtime", code="unsupported_endpoint"
        )
    from mstar_core.api.realtime.webrtc.call import RealtimeCall

    service = exchange.service
    secret = authorize(exchange)
    exchange.check_open()
    offer, patch = await _offer(exchange)
    service.sessions.check_room()
    check_name(exchange, patch.get("model"))
    session = RealtimeSession(exchange, {**({} if secret is None else secret.session), **patch})
    service.sessions.add(session)
    try:
        servers = ice_servers(exchange.limits, time.time() + exchange.limits.realtime_max_s)
        call = RealtimeCall(lambda: session.settings, servers, stall_s=exchange.limits.stall_timeout_s)
        answer = await call.answer(offer)
    except BaseException:
        service.sessions.end(session.id)
        raise
    task = asyncio.create_task(_serve(exchange, session, call), name=f"call {session.id}")
    service.detachable.add(task)
    task.add_done_callback(service.detachable.discard)
    return exchange.whole(answer.encode(), SDP, 201, {"Location": f"/v1/realtime/calls/{session.id}"})


async def _serve(exchange: Exchange, session: RealtimeSession, call: RealtimeCall) -> None:
    try:
        await session.serve(exchange, call)
    except Exception:  # isolation boundary: one call
        log.exception("a call failed")
    finally:
        exchange.service.sessions.end(session.id)
        await call.close("the call has ended")


async def hang_up(exchange: Exchange) -> HTTPResponse:
    """End a call."""
    session_id = str(exchange.request.match_info["call_id"])
    exchange.service.sessions.find(session_id, exchange.key)
    exchange.service.sessions.end(session_id)
    return exchange.whole(b"", "text/plain; charset=utf-8", 200)


async def _offer(exchange: Exchange) -> tuple[str, Mapping[str, Any]]:
    """Return the SDP offer of the body, and the fields of the session beside it."""
    if exchange.content_type.partition(";")[0].strip().lower() == SDP:
        body = b"".join([piece async for piece in read_pieces(exchange, SDP_BYTES)])
        return _text(body, "sdp"), {}
    form = await read_form(exchange, exchange.content_type, exchange.limits)
    fields = {**form.fields, **{file.field: _text(file.data, file.field) for file in form.files}}
    for name in fields:
        if name not in ("sdp", "session"):
            raise RequestError(f"{name[:40]} does not exist", hint="send sdp and session", field=name[:40])
    if not isinstance(fields.get("sdp"), str):
        raise RequestError("sdp is missing", hint=f"send the offer, or it alone as {SDP}", field="sdp")
    session = fields.get("session")
    if session is None:
        return fields["sdp"], {}
    return fields["sdp"], session if isinstance(session, dict) else parse_object(session.encode())


def _text(data: bytes, field: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{field} is not UTF-8", field=field) from error
