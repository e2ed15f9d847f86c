"""GET /openapi.json and GET /docs: the api of this deployment, for programs and for people."""

from __future__ import annotations

from typing import Final

from sanic.response import HTTPResponse

from mstar_core.api.http.exchange import Exchange

HTML: Final = "text/html; charset=utf-8"
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The page loads nothing and runs nothing."""


async def openapi_document(exchange: Exchange) -> HTTPResponse:
    """The OpenAPI description."""
    return exchange.json(exchange.service.description)


async def docs_page(exchange: Exchange) -> HTTPResponse:
    """The same as a page."""
    page = exchange.service.page
    return exchange.whole(page.encode(), HTML, headers={"Content-Security-Policy": POLICY})
