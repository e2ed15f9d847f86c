"""Live view in a browser: serves `mstarctl top` on the loopback address with textual-serve. Run by `top --web`."""

from __future__ import annotations

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
POLICY: Final = (
    "connect-src 'self' {socket}; font-src 'self' data:; style-src 'self' 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Blocks connections, fonts and styles of other origins. A stricter policy stops the page's terminal from drawing."""

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


def _guard(port: int) -> Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]:
    from aiohttp import web

    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_allowed(request.host, request.headers.get("Origin"), port):
            raise web.HTTPForbidden(text="this page may not connect\n")
        answer: Any = await handler(request)
        if isinstance(answer, web.Response) and answer.content_type == "text/html":
            answer.text = without_foreign(answer.text or "")
            answer.headers["Content-Security-Policy"] = POLICY.format(socket=f"ws://{HOST}:{port}")
        return answer

    return guard
