"""Web pages of the gateway: the list of models at `/`, a model's page at `/m/MODEL/`, and the page of the API."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final
from urllib.parse import quote, unquote

from aiohttp import web

from mstar_core.errors import NotFound
from mstar_core.gateway.parts import ModelStatus

COOKIE: Final = "mstar_model"
"""Model whose page a browser shows. It names the model of the page's requests that name none."""

TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Server": "mstar",
}

INDEX: Final = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>Models · mstarctl</title>
  <link rel="icon" href="/assets/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="/assets/style/base.css">
  <link rel="stylesheet" href="/assets/style/forms.css">
</head>
<body>
  <header class="bar">
    <span class="brand"><img src="/assets/icon.svg" alt="" width="22" height="22"> mstarctl</span>
    <h1>Models</h1>
    <nav class="links" aria-label="Pages"><a href="/docs">API docs</a></nav>
  </header>
  <main id="main" class="columns">
    <ul class="card" aria-label="Models">
{rows}
    </ul>
  </main>
</body>
</html>
"""


def index(statuses: Sequence[ModelStatus]) -> web.Response:
    """Return the list of models, each with its state and a link to its page."""
    rows = "\n".join(_row(status) for status in statuses) or "      <li>No model is served.</li>"
    return web.Response(text=INDEX.replace("{rows}", rows), content_type="text/html", headers=HEADERS)


def _row(status: ModelStatus) -> str:
    name, state = html.escape(status.name), html.escape(str(status.state))
    why = f' <span class="faint">{html.escape(status.reason)}</span>' if status.reason else ""
    return (
        f'      <li><a href="/m/{quote(status.name, safe="")}/">{name}</a> <span class="pill">{state}</span>{why}</li>'
    )


def model_page(model: str) -> web.Response:
    """Return the page of one model, whose requests then go to it."""
    page = asset("index.html")
    page.set_cookie(COOKIE, quote(model, safe=""), path="/", samesite="Strict", httponly=True)
    return page


def chosen(cookie: str | None) -> str | None:
    """Return the model of a cookie."""
    return unquote(cookie) if cookie else None


def asset(name: str) -> web.Response:
    """Return a static file of the pages. Raises NotFound for every name that the package does not contain."""
    body = _assets().get(name)
    if body is None:
        raise NotFound(f"/assets/{name[:80]} does not exist", kind="asset", name=name[:80])
    kind = TYPES[f".{name.rpartition('.')[2]}"]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)


@cache
def _assets() -> dict[str, bytes]:
    # Names are keys of a listing made once, never parts of a path, so `..` reaches nothing.
    return dict(_listed(files("mstar_core.api") / "console" / "static", ""))


def _listed(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _listed(entry, f"{prefix}{entry.name}/")
        elif f".{entry.name.rpartition('.')[2]}" in TYPES:
            found.append((f"{prefix}{entry.name}", entry.read_bytes()))
    return found
