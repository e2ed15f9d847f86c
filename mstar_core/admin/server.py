"""Serves the admin socket. A fixed table of routes; errors are code, title, detail, hint."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from sanic import Sanic
from sanic.response import json as json_response

from mstar_core.admin import view
from mstar_core.errors import NotFound, StartError, UsageError

if TYPE_CHECKING:
    from sanic.request import Request
    from sanic.response import HTTPResponse

API: Final = 1
BEAT_S: Final = 2.0
BODY_LIMIT: Final = 64 * 1024


class Deployment(view.DeploymentView, Protocol):
    """What the admin socket asks of the supervisor."""

    def stop(self, *, now: bool = False, reason: str = "", grace_s: float | None = None) -> None: ...

    def drain(self, reason: str = "") -> None: ...

    def resume(self) -> None: ...

    def ask_restart(self) -> None: ...


def bind_admin(path: Path) -> socket.socket:
    """Bind the socket ourselves, 0600, before any thread starts (the umask belongs to the whole process)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise StartError(
            "the admin socket cannot be opened", f"{path}: {error.strerror}", "choose a shorter MSTAR_RUNTIME_DIR"
        ) from error
    finally:
        os.umask(before)
    sock.listen(64)
    sock.setblocking(False)
    return sock


class AdminServer:
    """The server inside the supervisor's loop. Ends its streams before it closes."""

    def __init__(self, deployment: Deployment, sock: socket.socket) -> None:
        self._deployment = deployment
        self._sock = sock
        self._server: Any = None
        self._closing = asyncio.Event()
        self._app = self._make_app()

    async def start(self) -> None:
        """Begin to serve."""
        self._server = await self._app.create_server(
            sock=self._sock, return_asyncio_server=True, asyncio_server_kwargs={"start_serving": False}
        )
        await self._server.startup()
        await self._server.start_serving()

    async def stop(self) -> None:
        """End streams, then the server, then the socket."""
        self._closing.set()
        if self._server is not None:
            with suppress(Exception):  # the process ends next; nothing could be done about it
                await self._server.close()
        self._sock.close()

    def _make_app(self) -> Sanic[Any, Any]:
        Sanic.test_mode = False
        app: Sanic[Any, Any] = Sanic("mstar_admin", configure_logging=False)
        app.config.update(RESPONSE_TIMEOUT=3600, REQUEST_MAX_SIZE=BODY_LIMIT, MOTD=False, ACCESS_LOG=False)
        for path, handler in self._reads().items():
            app.add_route(_read(handler), path, methods=["GET"], name=f"get{path.replace('/', '_')}")
        app.add_route(self._events, "/v1/events", methods=["GET"], name="events")
        app.add_route(self._logs, "/v1/logs", methods=["GET"], name="logs")
        app.add_route(self._act, "/v1/deployment/<verb:str>", methods=["POST"], name="act")
        app.on_request(_owner_only)
        app.exception(Exception)(_problem)
        return app

    def _reads(self) -> dict[str, Callable[[], Any]]:
        d = self._deployment
        return {
            "/v1": lambda: {"api": API, "min_api": API, **view.deployment(d)},
            "/v1/snapshot": lambda: view.snapshot(d),
            "/v1/children": lambda: view.children(d),
            "/v1/health": lambda: {"state": d.state, "reason": d.reason},
            "/v1/clock": lambda: {"monotonic": asyncio.get_running_loop().time()},
        }

    async def _act(self, request: Request, verb: str) -> HTTPResponse:
        d = self._deployment
        match verb:
            case "stop":
                grace = _number(request, "grace", -1) if "grace" in request.args else None
                d.stop(now=request.args.get("now") == "1", reason="asked to stop", grace_s=grace)
            case "drain":
                d.drain("asked to drain")
            case "resume":
                d.resume()
            case "restart":
                d.ask_restart()
            case _:
                raise NotFound(
                    f"no action {verb!r}", hint="use stop, drain, resume or restart", kind="action", name=verb
                )
        return json_response({"state": d.state}, status=202)

    async def _events(self, request: Request) -> None:
        since = _number(request, "since", 0)
        await self._stream(request, self._new_events(since, follow=request.args.get("follow") == "1"))

    async def _new_events(self, since: int, *, follow: bool) -> AsyncIterator[dict[str, Any] | None]:
        events = self._deployment.events
        while True:
            for event in events.since(since):
                since = event["n"]
                yield event
            if not follow:
                return
            try:
                await asyncio.wait_for(events.wait(), BEAT_S)
            except TimeoutError:
                yield None

    async def _logs(self, request: Request) -> None:
        child = request.args.get("from", "")
        known = {c.name: c for c in self._deployment.children.values()}
        if child and child not in known:
            raise NotFound(f"no process {child!r}", hint=f"one of {', '.join(known)}", kind="process", name=child)
        chosen = [known[child]] if child else list(known.values())
        tail = _number(request, "tail", 100)
        await self._stream(request, self._log_lines(chosen, tail, follow=request.args.get("follow") == "1"))

    async def _log_lines(self, children: list[Any], tail: int, *, follow: bool) -> AsyncIterator[dict[str, Any] | None]:
        seen: dict[str, int] = {}
        for child in children:
            lines = list(child.log.tail)[-tail:] if tail else []
            seen[child.name] = child.log.lines
            for line in lines:
                yield {"from": child.name, "line": line}
        idle = 0.0
        while follow:
            fresh = False
            for child in children:
                new = min(child.log.lines - seen[child.name], len(child.log.tail))
                seen[child.name] = child.log.lines
                for line in list(child.log.tail)[len(child.log.tail) - new :]:
                    fresh = True
                    yield {"from": child.name, "line": line}
            idle = 0.0 if fresh else idle + 0.2
            if idle >= BEAT_S:
                idle = 0.0
                yield None
            await asyncio.sleep(0.2)

    async def _stream(self, request: Request, lines: AsyncIterator[dict[str, Any] | None]) -> None:
        response = await request.respond(content_type="application/x-ndjson; charset=utf-8")
        async for line in lines:
            if self._closing.is_set():
                break
            await response.send((json.dumps(line if line is not None else {"beat": True}, default=str) + "\n").encode())
        await response.eof()


def _read(handler: Callable[[], Any]) -> Callable[[Request], Any]:
    async def answer(request: Request) -> HTTPResponse:
        return json_response(handler(), dumps=_dumps)

    return answer


def _dumps(value: Any) -> str:
    return json.dumps(value, default=str)


def _number(request: Request, name: str, default: int) -> int:
    text = request.args.get(name, str(default))
    if not text.isdigit():
        raise UsageError(f"{name} is {text!r}", hint="send a whole number")
    return int(text)


async def _owner_only(request: Request) -> HTTPResponse | None:
    """Only the owner and root may speak here; the socket's mode says so, and the peer's uid proves it."""
    sock = request.transport.get_extra_info("socket") if request.transport else None
    if sock is None:
        return None
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid in (0, os.getuid()):
        return None
    body = {
        "code": "refused",
        "title": "this deployment belongs to another user",
        "detail": f"peer uid {uid}",
        "hint": "",
    }
    return json_response(body, status=403)


async def _problem(request: Request, error: Exception) -> HTTPResponse:
    title = getattr(error, "title", None) or str(error) or type(error).__name__
    status = getattr(error, "status", None) or getattr(error, "status_code", None) or 500
    body = {
        "code": getattr(error, "code", None) or "error",
        "title": title,
        "detail": getattr(error, "detail", ""),
        "hint": getattr(error, "hint", ""),
    }
    return json_response(body, status=int(status))
