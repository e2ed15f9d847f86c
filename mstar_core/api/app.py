"""Sanic application: the routes and the wrapper that all of them share. Built and served by `main`."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from typing import Any, Final

from sanic import Request, Sanic
from sanic.exceptions import MethodNotAllowed as SanicMethodNotAllowed
from sanic.exceptions import NotFound as SanicNotFound
from sanic.exceptions import PayloadTooLarge, RequestCancelled, RequestTimeout, SanicException
from sanic.handlers import ErrorHandler
from sanic.response import HTTPResponse

from mstar_core.api.errors import MethodNotAllowed, PeerError, SlowUpload, reply_of, unsupported_endpoint
from mstar_core.api.exchange import DETACH, Exchange, new_exchange, take_header_id
from mstar_core.api.http.access import check_browser, check_key, check_metrics_key, preflight_headers
from mstar_core.api.http.connection import HEAD_S, InvalidHead
from mstar_core.api.http.sanic_protocol import Application, limit_headers
from mstar_core.api.http.websocket import MESSAGE_BYTES, PING_S
from mstar_core.api.openapi import describe
from mstar_core.api.requests.registry import ReceivingRequest
from mstar_core.api.route_table import ROUTES, Handler, HttpRoute
from mstar_core.api.routes.deployment import mapped_endpoints
from mstar_core.api.service import Service
from mstar_core.errors import Cancelled, MstarError, NotFound, RequestError, TooLarge, did_you_mean
from mstar_core.process.logs import request_scope

HEADER_BYTES: Final = 32 * 1024
KEEP_ALIVE_S: Final = 120
"""Longer than the idle timeout of common clients, so that the client closes the connection first."""

DRAIN_BYTES: Final = 16 << 20
"""Bytes of a refused body that are still read, so that the client sees the response instead of a connection reset."""

NO_LIMIT_S: Final = 7 * 24 * 3600
"""Disables Sanic's response timeout; each request has its own deadline."""

log = logging.getLogger("mstar.api")


def make_app(service: Service) -> Sanic[Any, Any]:
    """Build the application of a service. Its name is unique because Sanic registers all applications globally."""
    app: Sanic[Any, Any] = Application(
        f"mstar-{secrets.token_hex(8)}", configure_logging=False, error_handler=_Errors(service)
    )
    limit_headers(HEADER_BYTES)
    app.config.update(
        {
            "ACCESS_LOG": False,
            "MOTD": False,
            "TOUCHUP": False,  # touch-up rewrites Sanic's functions once per process and fails the second time
            "KEEP_ALIVE_TIMEOUT": KEEP_ALIVE_S,
            "REQUEST_TIMEOUT": HEAD_S,
            "RESPONSE_TIMEOUT": NO_LIMIT_S,
            "REQUEST_MAX_HEADER_SIZE": HEADER_BYTES,
            # The exchange enforces the limit first.
            "REQUEST_MAX_SIZE": service.deployment.api.max_body_bytes + DRAIN_BYTES,
            "FALLBACK_ERROR_FORMAT": "json",
            "WEBSOCKET_MAX_SIZE": MESSAGE_BYTES,
            "WEBSOCKET_PING_INTERVAL": PING_S,
            "WEBSOCKET_PING_TIMEOUT": PING_S,
        }
    )
    mapped = mapped_endpoints(service.model)
    served = _served(service)
    for route in served:
        _add(app, service, route, route.handler)
    paths = {(route.method, route.path) for route in served}
    for route in ROUTES:
        if not route.is_console and (route.method, route.path) not in paths:
            _add(app, service, route, _unsupported(route.path, mapped))
    if any(route.is_socket for route in served):
        app.enable_websocket()
    service.description = describe(service.deployment, service.model, served)
    return app


def _served(service: Service) -> list[HttpRoute]:
    """Return the routes of this deployment. Of two routes with one path, the first one is served."""
    routes: dict[tuple[str, str], HttpRoute] = {}
    for route in ROUTES:
        is_mapped = not route.needs or bool(service.model.routes.intersection(route.needs))
        if is_mapped and (service.deployment.api.console or not route.is_console):
            routes.setdefault((route.method, route.path), route)
    return list(routes.values())


def _unsupported(path: str, mapped: list[str]) -> Handler:
    async def refuse(exchange: Exchange) -> HTTPResponse | None:
        raise unsupported_endpoint(path, mapped)

    return refuse


def _add(app: Sanic[Any, Any], service: Service, route: HttpRoute, handler: Handler) -> None:
    async def handle(request: Request, **_: str) -> HTTPResponse | None:
        exchange = new_exchange(service, request, route.name, is_native=route.is_native)
        if route.reads_body and exchange.header(DETACH) is not None:
            return await _detachable(exchange, route, handler)
        return await _guarded(exchange, route, handler)

    async def preflight(request: Request, **_: str) -> HTTPResponse:
        exchange = new_exchange(service, request, route.name, is_native=route.is_native)
        requested = request.headers.get("access-control-request-headers")
        return exchange.whole(b"", "text/plain; charset=utf-8", 204, preflight_headers(requested))

    if route.is_socket:
        handle.is_websocket = True  # type: ignore[attr-defined]  # how Sanic knows that no answer need come back
    reads = ["HEAD"] if route.method == "GET" and not route.is_socket else []  # Sanic omits the body
    app.add_route(handle, route.path, methods=[route.method, *reads], name=route.name, stream=True)
    if service.deployment.api.cors_origins and not route.shares_path:
        app.add_route(preflight, route.path, methods=["OPTIONS"], name=f"{route.name}_preflight")


async def _detachable(exchange: Exchange, route: HttpRoute, handler: Handler) -> HTTPResponse | None:
    """Run a handler in a task of its own, which goes on when the connection is closed if its events are kept."""
    task = asyncio.create_task(_guarded(exchange, route, handler))
    exchange.service.detachable.add(task)
    task.add_done_callback(exchange.service.detachable.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not exchange.leave():
            task.cancel()
        raise


async def _guarded(exchange: Exchange, route: HttpRoute, handler: Handler) -> HTTPResponse | None:
    # Isolation boundary of one request: every exception of a handler becomes one response, one log line, one count.
    with request_scope(exchange.request_id):
        return await _answered(exchange, route, handler)


async def _answered(exchange: Exchange, route: HttpRoute, handler: Handler) -> HTTPResponse | None:
    service = exchange.service
    arriving: ReceivingRequest | None = None
    try:
        take_header_id(exchange)
        api = service.deployment.api
        check_browser(api, exchange.request.method, exchange.request.headers)
        if route.name == "metrics":
            check_metrics_key(api, exchange.request.headers)
        elif not route.is_open:
            exchange.key = check_key(api.api_keys, exchange.request.headers)
        if not route.reads_body:
            await exchange.skip()
            return await handler(exchange)
        service.link.spin.rouse()
        with service.registry.arriving(exchange.request_id, route=route.name, key=exchange.key) as arriving:
            return await handler(exchange)
    except asyncio.CancelledError:
        if arriving is not None and arriving.is_cancelled:
            arriving.task.uncancel()
            return await _failed(exchange, Cancelled("the request was cancelled by its id"))
        exchange.status, exchange.code = 499, "disconnected"
        raise
    except MstarError as error:
        return await _failed(exchange, error)
    except Exception as error:
        log.exception("a handler failed")
        return await _failed(exchange, error)
    finally:
        exchange.events.end()
        exchange.flush()  # Sanic ends a body that the handler did not end
        if exchange.delivery is not None and exchange.delivery.is_replay:
            exchange.abort()  # the replay of a request ended before the response that the client has
        service.held.give(exchange.held_bytes)
        # Runs in the next loop iteration: a complete response is sent in this one and need not wait for its log line.
        asyncio.get_running_loop().call_soon(_note, exchange, route, service.clock() - exchange.started)


async def _failed(exchange: Exchange, error: Exception) -> HTTPResponse | None:
    reply = reply_of(error, exchange.request_id)
    exchange.status, exchange.code, exchange.message = reply.status, reply.code, reply.message
    is_logged = isinstance(error, PeerError)  # by the link, when it arrived
    if isinstance(error, MstarError) and error.detail and reply.status >= 500 and not is_logged:
        log.error(
            "a request failed: %s", error.title, extra={"facts": {"detail": error.detail, "id": exchange.request_id}}
        )
    exchange.service.count_refusal(reply, error)
    with suppress(MstarError, RequestCancelled):  # the client does not read, or has gone
        if await exchange.fail_begun(reply):
            return None
    if not exchange.has_begun:
        exchange.keep_failure(reply)
    if exchange.has_begun:
        if exchange.code in ("internal_error", "stalled"):
            exchange.abort(
                drops=exchange.code == "stalled"
            )  # no error event was sent: only an aborted connection signals the failure
        return None
    return exchange.json(reply.native_body if exchange.is_native else reply.body, reply.status, reply.headers)


def _note(exchange: Exchange, route: HttpRoute, total_s: float) -> None:
    if route.is_socket and exchange.has_begun:
        return  # the handler logs each of its requests
    exchange.note(exchange.request_id, exchange.code, exchange.status, total_s, is_work=route.reads_body)


class _Errors(ErrorHandler):
    """Error responses for requests that reach no handler: unknown paths, wrong methods, broken HTTP."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service

    def default(self, request: Request, exception: Exception) -> HTTPResponse:
        exchange = new_exchange(self._service, request, "none", is_native=request.path == "/generate")
        with suppress(RequestError):
            take_header_id(exchange)
        error = _http_error(request, exception)
        if not isinstance(error, MstarError):
            log.error("a request failed before its handler", exc_info=exception)
        reply = reply_of(error, exchange.request_id)
        self._service.metrics.requests.labels("none", reply.code).inc()
        return exchange.json(reply.native_body if exchange.is_native else reply.body, reply.status, reply.headers)


def _http_error(request: Request, exception: Exception) -> Exception:
    match exception:
        case SanicNotFound():
            hint = did_you_mean(request.path, [route.path for route in ROUTES if "<" not in route.path])
            return NotFound(f"{request.path[:80]} does not exist", hint=hint)
        case SanicMethodNotAllowed():
            allowed = ", ".join(sorted(exception.allowed_methods or ()))
            return MethodNotAllowed(
                f"{request.path[:80]} does not support {request.method[:16]}", hint=f"use {allowed}", allowed=allowed
            )
        case InvalidHead():
            return RequestError(str(exception), code="bad_request")
        case PayloadTooLarge():
            return TooLarge("the headers or the body are too large", code="body_too_large")
        case RequestTimeout():
            return SlowUpload("the request arrived too slowly")
        case RequestCancelled():
            return RequestError("the connection was closed", code="cancelled")
        case SanicException() if exception.status_code < 500:
            return RequestError("the request is not valid HTTP", code="bad_request")
        case _:
            return exception
