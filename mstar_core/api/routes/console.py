"""GET /, /docs and /assets/{name}: the web pages. GET /console/…: what they show of the deployment and its host."""

from __future__ import annotations

import asyncio
import ipaddress
from contextlib import aclosing
from typing import Any, Final

from sanic.response import HTTPResponse

from mstar_core.api.console.assets import HEADERS, asset
from mstar_core.api.console.neighbours import neighbours
from mstar_core.api.console.supervisor_view import live_frames, request_trace
from mstar_core.api.errors import Forbidden
from mstar_core.api.exchange import Exchange, event
from mstar_core.api.http.access import check_key, host_name, is_local_name
from mstar_core.api.output.kept_events import EVENTS
from mstar_core.api.routes.request_state import unknown
from mstar_core.api.routes.robot_policy import robot_policy
from mstar_core.errors import Unavailable

LIVE_HZ: Final = 2.0
MAX_VIEWS: Final = 4
"""The admin socket has 16 places for watches; the others remain for `mstarctl top`."""


async def page(exchange: Exchange) -> HTTPResponse:
    """Return the web page. It needs no key: it contains nothing of the deployment."""
    return _file(exchange, "index.html")


async def page_or_robot_policy(exchange: Exchange) -> HTTPResponse | None:
    """Serve a robot if the request is a WebSocket handshake, otherwise return the web page."""
    headers = exchange.request.headers
    api = exchange.service.deployment.api
    if api.console and "websocket" not in str(headers.get("upgrade") or "").lower():
        return await page(exchange)
    exchange.key = check_key(api.api_keys, headers)
    return await robot_policy(exchange)


async def docs_page(exchange: Exchange) -> HTTPResponse:
    """Return the page that shows the API description. It needs no key: the description itself does."""
    return _file(exchange, "docs.html")


async def asset_file(exchange: Exchange) -> HTTPResponse:
    """Return a script, style or image of the pages."""
    return _file(exchange, exchange.path_name)


async def live(exchange: Exchange) -> None:
    """Stream the graph with rates and placement as server-sent events."""
    check_reader(exchange)
    service = exchange.service
    if service.live_views >= MAX_VIEWS:
        raise Unavailable("too many live views are open", hint="close other pages")
    exchange.end_with_process()
    service.live_views += 1
    try:
        async with aclosing(live_frames(service.deployment.run_dir, LIVE_HZ)) as frames:
            async for frame in frames:
                await exchange.send([event(frame)], EVENTS)
    finally:
        service.live_views -= 1
    await exchange.end()


async def trace(exchange: Exchange) -> HTTPResponse:
    """Return the spans of a request that this key sent."""
    check_reader(exchange)
    name = exchange.path_name
    handle = exchange.service.registry.handle_of(name, exchange.key)
    if handle is None:
        raise unknown()
    return exchange.json(await request_trace(exchange.service.deployment.run_dir, name, handle))


async def other_deployments(exchange: Exchange) -> HTTPResponse:
    """Return the other deployments of this host, to this host only: a key of one deployment reveals no other."""
    check_local(exchange)
    others = await asyncio.to_thread(neighbours, exchange.service.deployment.run_dir)
    return exchange.json({"deployments": others})


def check_reader(exchange: Exchange) -> None:
    """Raise Forbidden unless the request has an API key or comes from this host."""
    if not exchange.key:
        check_local(exchange)


def check_local(exchange: Exchange) -> None:
    """Raise Forbidden unless the request comes from this host.

    A request through a proxy comes from anywhere. The host name is checked as well: a foreign page whose name resolves
    to 127.0.0.1 could read the answer otherwise.
    """
    request: Any = exchange.request
    peer = request.transport.get_extra_info("peername")
    headers = request.headers
    is_forwarded = any(name in headers for name in ("forwarded", "x-forwarded-for", "x-real-ip"))
    if is_forwarded or not _is_loopback(peer) or not is_local_name(host_name(str(headers.get("host") or ""))):
        raise Forbidden(
            "the live view is served only to this host",
            hint="set an API key, or open the page by http://localhost",
            code="loopback_only",
        )


def _is_loopback(peer: Any) -> bool:
    if not isinstance(peer, tuple):
        return False
    address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _file(exchange: Exchange, name: str) -> HTTPResponse:
    file = asset(name)
    return exchange.whole(file.body, file.content_type, headers=HEADERS)
