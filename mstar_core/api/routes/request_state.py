"""GET /v1/requests/{id} and POST /v1/requests/{id}/cancel: state and cancellation of requests."""

from __future__ import annotations

from collections.abc import Sequence

from sanic.response import HTTPResponse

from mstar_core.api.exchange import Exchange
from mstar_core.api.requests.registry import LiveRequest, ReceivingRequest
from mstar_core.errors import NotFound


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
