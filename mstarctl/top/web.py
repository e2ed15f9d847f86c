"""Live view in a browser: serves `mstarctl top` on the loopback address with textual-serve. Run by `top --web`."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from mstar_core.errors import UsageError

if TYPE_CHECKING:
    from aiohttp import web

HOST: Final = "127.0.0.1"
OPTION: Final = "--web"
DRIVER: Final = "TEXTUAL_DRIVER"
"""Variable that textual-serve sets in the programs that it runs."""

FOREIGN: Final = re.compile(r"<link[^>]*https?://(?!127\.0\.0\.1[:/])[^>]*>")
HEAD: Final = """<link rel="icon" href="data:,"><script>
new MutationObserver((_, seen) => {
  const input = document.querySelector(".-first-byte .xterm-helper-textarea");
  if (input) { input.focus(); seen.disconnect(); }
}).observe(document.documentElement, { attributeFilter: ["class"], subtree: true });
</script>"""
"""Added to the page: the terminal takes keys without a click, and the browser asks for no icon."""

SCRIPT: Final = re.compile(r"<script>(.*?)</script>", re.DOTALL)
HANDLER: Final = re.compile(r"\son[a-z]+=\"([^\"]*)\"", re.IGNORECASE)
POLICY: Final = (
    "default-src 'none'; script-src 'self' 'unsafe-hashes' {hashes}; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self' {socket}; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Blocks everything from other origins and inline scripts other than those of the page, which are named by hash.

The terminal writes style elements at run time, so inline styles must be allowed.
"""

Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


def child_command(argv: Sequence[str]) -> str:
    """Return the command that runs in the browser: the given one without `--web`, and read-only.

    argv: the arguments of this program, global options included.
    """
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word == OPTION:
            next(words, None)
        elif not word.startswith(f"{OPTION}="):
            kept.append(word)
    return shlex.join([sys.executable, "-m", "mstarctl", *kept, "--readonly"])


def serve_top(argv: Sequence[str], port: int) -> None:
    """Serve the live view until Ctrl-C. Raises UsageError without the extra."""
    try:
        from textual_serve.server import Server
    except ImportError as error:
        hint = "pip install 'mstarctl[web]'"
        raise UsageError("top --web needs textual-serve", str(error), hint) from error
    from aiohttp import web

    class LocalServer(Server):  # type: ignore[misc]  # the package is an optional extra
        """Answers only pages of its own origin: any page of the browser could open its WebSocket otherwise."""

        async def _make_app(self) -> web.Application:
            app = await super()._make_app()
            app.middlewares.append(web.middleware(_guard(port)))
            return app

    LocalServer(child_command(argv), host=HOST, port=port, title="mstarctl top").serve()


def is_allowed(host: str, origin: str | None, port: int) -> bool:
    """Return whether a request may be answered: sent to the loopback name, by a page of this server or by none."""
    names = {f"{name}:{port}" for name in (HOST, "localhost")}
    return host.lower() in names and (origin is None or origin.removeprefix("http://").lower() in names)


def without_foreign(text: str) -> str:
    """Return a page without links to other origins; textual-serve's page loads a font from one."""
    return FOREIGN.sub("", text)


def policy(page: str, port: int) -> str:
    """Return the content security policy of a page: its own inline scripts and handlers run, no others."""
    inline = [*SCRIPT.findall(page), *HANDLER.findall(page)]
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline)
    quoted = " ".join(dict.fromkeys(f"'sha256-{digest}'" for digest in hashes))
    return POLICY.format(hashes=quoted, socket=f"ws://{HOST}:{port}")


def _guard(port: int) -> Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]:
    from aiohttp import web

    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_allowed(request.host, request.headers.get("Origin"), port):
            raise web.HTTPForbidden(text="this page may not connect\n")
        if request.path == "/" and not request.host.startswith(HOST):
            # The page names its files and its socket by this address; under another name they were foreign.
            raise web.HTTPFound(f"http://{HOST}:{port}/")
        answer: Any = await handler(request)
        if isinstance(answer, web.Response) and answer.content_type == "text/html":
            answer.text = without_foreign(answer.text or "").replace("<head>", f"<head>{HEAD}", 1)
            answer.headers["Content-Security-Policy"] = policy(answer.text, port)
            answer.headers["Referrer-Policy"] = "no-referrer"
        if not answer.prepared:
            answer.headers["X-Content-Type-Options"] = "nosniff"
        return answer

    return guard
