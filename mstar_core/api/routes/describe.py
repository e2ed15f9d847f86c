"""GET /openapi.json and GET /docs: the API description of this deployment."""

from __future__ import annotations

from typing import Final

from sanic.response import HTTPResponse

from mstar_core.api.http.exchange import Exchange

HTML: Final = "text/html; charset=utf-8"
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The page loads nothing and runs no scripts."""


async def openapi_document(exchange: Exchange) -> HTTPResponse:
    """Return the OpenAPI description."""
    return exchange.json(exchange.service.description)


async def docs_page(exchange: Exchange) -> HTTPResponse:
    """Return the description as an HTML page."""
    page = exchange.service.page
    return exchange.whole(page.encode(), HTML, headers={"Content-Security-Policy": POLICY})
