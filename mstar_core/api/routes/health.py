"""GET /health, /ready, /version, /metrics: endpoints for monitoring and load balancers."""

from __future__ import annotations

from typing import Any

from sanic.response import HTTPResponse

from mstar_core.api.http.exchange import Exchange
from mstar_core.api.link import CONDUCTOR
from mstar_core.api.metrics import CONTENT_TYPE

API_VERSION = 1


async def health(exchange: Exchange) -> HTTPResponse:
    """Return whether every process is alive."""
    deployment = exchange.service.link.deployment
    gone = next(iter(deployment.down.items()), None)
    if deployment.state == "unhealthy" or gone is not None:
        component, reason = gone or ("deployment", deployment.reason or "unhealthy")
        exchange.code = "unhealthy"
        return exchange.json({"status": "unhealthy", "component": component, "reason": reason}, 503)
    if deployment.is_draining or deployment.state == "draining":
        return exchange.json({"status": "draining", "phase": deployment.phase})
    if deployment.state == "ready" and CONDUCTOR in deployment.up:
        return exchange.json({"status": "healthy"})
    return exchange.json({"status": "starting", "phase": deployment.phase})


async def ready(exchange: Exchange) -> HTTPResponse:
    """Return whether a request would be accepted now."""
    problem = exchange.service.link.deployment.problem()
    if problem is None:
        return exchange.json({"status": "ready", "model": exchange.service.deployment.name})
    exchange.code = problem.code
    deployment = exchange.service.link.deployment
    body: dict[str, Any] = {"status": "unavailable", "reason": problem.code, "message": problem.public}
    if problem.code == "starting":
        body |= {"phase": deployment.phase, "progress": deployment.reason}
    return exchange.json(body, 503, {"Retry-After": "2"})


async def version(exchange: Exchange) -> HTTPResponse:
    """Return the versions of the server, the model and its plugin."""
    service = exchange.service
    versions = service.deployment.versions
    distribution = next((name for name in versions if name != "mstarctl"), "")
    return exchange.json(
        {
            "version": versions.get("mstarctl", "0"),
            "api": API_VERSION,
            "model": service.model.name,
            "plugin": {
                "name": service.deployment.plugin,
                "distribution": distribution,
                "version": versions.get(distribution, "0"),
            },
            "started_at": service.created,
        }
    )


async def metrics(exchange: Exchange) -> HTTPResponse:
    """Return the metrics in the Prometheus text format."""
    return exchange.whole(exchange.service.metrics.text(), CONTENT_TYPE)
