"""GET /v1/requests/{id} and POST /v1/requests/{id}/cancel: state and cancellation of requests."""

from __future__ import annotations

from sanic.response import HTTPResponse

from mstar_core.api.http.exchange import Exchange
from mstar_core.errors import Cancelled, NotFound


async def request_state(exchange: Exchange) -> HTTPResponse:
    """Return the state of a live request or the outcome of a finished one."""
    name = exchange.path_name
    registry = exchange.service.registry
    live = registry.find(name, exchange.key)
    if live is not None:
        body = {"id": name, "object": "request", "status": live.state, "route": live.route, "created": live.created}
        return exchange.json({**body, "error": None})
    arriving = registry.arrives(name, exchange.key)
    if arriving is not None:
        came = {"route": arriving.route, "created": arriving.created, "error": None}
        return exchange.json({"id": name, "object": "request", "status": "preprocessing", **came})
    outcome = registry.outcome(name, exchange.key)
    if outcome is None:
        raise unknown()
    return exchange.json(outcome)


async def cancel(exchange: Exchange) -> HTTPResponse:
    """Cancel a request. Has no effect on finished requests."""
    name = exchange.path_name
    registry = exchange.service.registry
    items = registry.items(name, exchange.key)
    if items:
        for live in items:
            live.fail(Cancelled("the request was cancelled by its id"))
        return exchange.json({"id": name, "status": "cancelled"})
    arriving = registry.arrives(name, exchange.key)
    if arriving is not None:
        arriving.cancel()
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
