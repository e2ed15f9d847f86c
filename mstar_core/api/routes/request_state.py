"""GET /v1/requests/{id}, its events, its cancellation, DELETE /v1/sessions/{id}: requests and sessions by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sanic.response import HTTPResponse

from mstar_core.api.exchange import PING, Exchange
from mstar_core.api.output.kept_events import EVENTS, EventLog
from mstar_core.api.output.line_formats import LINES, NDJSON, pieces
from mstar_core.api.requests.registry import LiveRequest, ReceivingRequest
from mstar_core.api.schema import DeletedSession
from mstar_core.errors import MstarError, NotFound, RequestError

MOST_DIGITS: Final = 15


async def request_state(exchange: Exchange) -> HTTPResponse:
    """Return the state of a live request or the outcome of a finished one."""
    name = exchange.path_name
    registry = exchange.service.registry
    request = registry.find(name, exchange.key) or registry.arrives(name, exchange.key)
    if request is not None:
        body = {
            "id": name,
            "object": "request",
            "status": request.state,
            "route": request.route,
            "created": request.created,
        }
        attempts = request.attempts if isinstance(request, LiveRequest) else {}
        return exchange.json({**body, "error": None, **attempts})
    outcome = registry.outcome(name, exchange.key)
    if outcome is None:
        raise unknown()
    return exchange.json(outcome)


async def events(exchange: Exchange) -> None:
    """Stream the events of a request behind a number, and those that follow, as the request's own response has them."""
    name, after = exchange.path_name, _after(exchange)
    log = exchange.service.kept_events.find(name, exchange.key)
    if log is None:
        raise NotFound(
            "no events of this request are kept",
            hint="they are kept for requests with the header X-Mstar-Detach, for a while, until the server restarts",
            code="request_not_found",
        )
    await follow(exchange, log, after)


async def follow(exchange: Exchange, log: EventLog, after: int) -> None:
    """Stream the events of a log behind number `after` to its end. Raises RequestError, EventsGone."""
    log.check(after)
    exchange.end_with_process()
    keepalive = {EVENTS: PING, NDJSON: LINES.keepalive}.get(log.content_type, b"")
    try:
        async for ready in log.since(after, exchange.service.keepalive_s):
            for data in pieces(ready) if ready else (keepalive,):
                if data:
                    await exchange.write(data, log.content_type)
    except MstarError as error:
        if exchange.has_begun:  # only an aborted connection says that the response is not complete
            exchange.abort(drops=error.code == "stalled")
        raise
    await exchange.write(b"", log.content_type)
    await exchange.end()


def _after(exchange: Exchange) -> int:
    """Return the number of the last event that the client has. Raises RequestError."""
    value = exchange.request.args.get("after") or exchange.header("last-event-id") or "0"
    if not (value.isascii() and value.isdigit() and len(value) <= MOST_DIGITS):
        raise RequestError(
            "after must be the number of an event", hint="0 sends all events", field="after", allowed="0, 1, 2, …"
        )
    return int(value)


async def cancel(exchange: Exchange) -> HTTPResponse:
    """Cancel a request. Has no effect on finished requests."""
    name = exchange.path_name
    registry = exchange.service.registry
    arriving = registry.arrives(name, exchange.key)
    requests: Sequence[LiveRequest | ReceivingRequest] = registry.items(name, exchange.key)
    if not requests and arriving is not None:
        requests = [arriving]
    for request in requests:
        request.cancel()
    if requests:
        return exchange.json({"id": name, "status": "cancelled"})
    outcome = registry.outcome(name, exchange.key)
    if outcome is None:
        raise unknown()
    return exchange.json({"id": name, "status": "cancelled" if outcome["status"] == "cancelled" else "finished"})


def unknown() -> NotFound:
    """Return the error for an unknown id, which is also used for requests of other API keys."""
    return NotFound(
        "the request id is unknown",
        hint="finished requests are remembered only for a while",
        code="request_not_found",
    )


async def end_session(exchange: Exchange) -> HTTPResponse:
    """End a session: its ids are forgotten, and its pages are no longer kept. Raises NotFound."""
    session_id = exchange.path_name
    exchange.service.client_sessions.delete(exchange.key, session_id)
    return exchange.json(DeletedSession(id=session_id))
