"""HTTP server of the admin socket, on the supervisor's loop. Routes come from the table of endpoints."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from sanic import Sanic
from sanic.exceptions import NotFound as NoRoute
from sanic.response import json as json_response
from sanic.response import raw

from mstar_core.admin import payloads
from mstar_core.admin.access import Access, access_of, peer_of
from mstar_core.admin.endpoints import ENDPOINTS, openapi_document
from mstar_core.admin.messages import (
    LEVELS,
    LIMIT,
    IdempotentAnswers,
    as_json,
    body,
    find_request,
    flag,
    json_object,
    no_route,
    node_names,
    number,
    ordered,
    parts,
    problem,
    rank,
    whole,
)
from mstar_core.admin.recordings import Recordings
from mstar_core.admin.streams import NDJSON, NdjsonStreams
from mstar_core.config.scaling import FreeDevice
from mstar_core.errors import NotFound, Refused, StateConflict, UsageError, did_you_mean
from mstar_core.observe.filter import Filter
from mstar_core.observe.metrics import CONTENT_TYPE
from mstar_core.observe.request_log import RequestRecord, request_item

if TYPE_CHECKING:
    from sanic.request import Request
    from sanic.response import HTTPResponse

    from mstar_core.supervisor.supervisor import Supervisor

BODY_LIMIT: Final = 64 * 1024
RESPONSE_S: Final = 3600
SERVING: Final = ("ready", "degraded")
ASLEEP: Final = "sleeping"
NOT_HEALTHY: Final = ("failed", "unhealthy", "stopping")
READ_METHODS: Final = ("GET", "HEAD")

Handler = Callable[..., Coroutine[Any, Any, "HTTPResponse | None"]]


class AdminServer:
    """The admin socket's server. Owned by the supervisor's main. gid: the group that may read."""

    def __init__(
        self, deployment: Supervisor, sock: socket.socket, gid: int | None = None, streams: NdjsonStreams | None = None
    ) -> None:
        self._deployment = deployment
        self._sock = sock
        self._gid = gid
        self._server: Any = None
        self._streams = streams or NdjsonStreams()
        self._answers = IdempotentAnswers()
        self._recordings = Recordings(Path(deployment.spec.run_dir) / "recordings", deployment.publisher.requests)
        deployment.publisher.requests.on_end.append(self._recordings.ended)
        self._app = self._make_app()

    async def start(self) -> None:
        """Start to serve."""
        self._server = await self._app.create_server(
            sock=self._sock, return_asyncio_server=True, asyncio_server_kwargs={"start_serving": False}
        )
        await self._server.startup()
        await self._server.start_serving()

    async def stop(self) -> None:
        """Close the streams, then the server, then the socket."""
        self._streams.close()
        if self._server is not None:
            with suppress(Exception):  # the process ends next, so an error has no consequence
                self._server.close()
                await self._server.wait_closed()
                for connection in list(self._server.connections):
                    connection.abort()
        Sanic.unregister_app(self._app)
        self._recordings.close()
        self._sock.close()

    def _make_app(self) -> Sanic[Any, Any]:
        Sanic.test_mode = False
        app: Sanic[Any, Any] = Sanic("mstar_admin", configure_logging=False)
        app.config.update(
            RESPONSE_TIMEOUT=RESPONSE_S,
            REQUEST_MAX_SIZE=BODY_LIMIT,
            MOTD=False,
            ACCESS_LOG=False,
            TOUCHUP=False,  # it patches Sanic once per process and fails the second time
        )
        handlers = self.handlers()
        for endpoint in ENDPOINTS:
            path = endpoint.path.replace("{id}", "<key:str>")
            app.add_route(handlers[endpoint.name], path, methods=[endpoint.method], name=endpoint.name, unquote=True)
        app.on_request(self._admit)
        app.exception(Exception)(self._problem)
        return app

    def handlers(self) -> Mapping[str, Handler]:
        """Return the handlers by the names of their endpoints."""
        target = self._deployment
        return {
            "head": self._reads(lambda: payloads.head(target), is_fresh=True),
            "children": self._reads(lambda: payloads.children(target), is_fresh=True),
            "graph": self._reads(lambda: msgspec.to_builtins(target.hub.store.graph)),
            "config": self._reads(lambda: payloads.config(target)),
            "clock": self._reads(lambda: {"monotonic": target.hub.now(), "time": time.time()}),
            "openapi": self._reads(openapi_document),
            "recordings": self._reads(lambda: {"items": [recording.facts() for recording in self._recordings.all()]}),
            "drain": self._acts(lambda: target.drain("asked to drain")),
            "resume": self._acts(target.resume),
            "reload": self._reload,
            "restart": self._restart,
            "set": self._set,
            "scale": self._scale,
            "adapters": self._reads(target.adapters.facts),
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "cordon": self._cordon,
            "uncordon": self._uncordon,
            "health": self._checks(lambda state: state not in NOT_HEALTHY),
            "ready": self._checks(
                lambda state: state in SERVING or (state == ASLEEP and target.spec.api.wake_on_request)
            ),
            "snapshot": self._snapshot,
            "watch": self._watch,
            "requests": self._requests,
            "request": self._request,
            "trace": self._trace,
            "cancel": self._cancel,
            "logs": self._logs,
            "events": self._events,
            "metrics": self._metrics,
            "stop": self._stop,
            "sleep": self._sleep,
            "wake": self._wake,
            "log_level": self._log_level,
            "record": self._record,
            "recording": self._recording,
            "progress": self._progress,
            "erase": self._erase,
        }

    def _reads(self, make: Callable[[], Any], *, is_fresh: bool = False) -> Handler:
        async def read(request: Request) -> HTTPResponse:
            if is_fresh:
                self._deployment.publisher.refresh(now_all=True)
            return _json(make())

        return read

    def _acts(self, act: Callable[[], None]) -> Handler:
        async def acted(request: Request) -> HTTPResponse:
            return self._act(request, act)

        return acted

    def _checks(self, is_good: Callable[[str], bool]) -> Handler:
        async def checked(request: Request) -> HTTPResponse:
            state = self._deployment.state
            return _json({"state": state, "reason": self._deployment.reason}, 200 if is_good(state) else 503)

        return checked

    # -- reads --------------------------------------------------------------------------------------------------------

    async def _snapshot(self, request: Request) -> HTTPResponse:
        self._deployment.publisher.refresh(now_all=True)
        frame = self._deployment.hub.snapshot(parts=parts(request), filter_text=request.args.get("filter", ""))
        return _json(payloads.snapshot(self._deployment, frame))

    async def _requests(self, request: Request) -> HTTPResponse:
        chosen = Filter.parse(request.args.get("filter", ""))
        limit, since = whole(request, "limit", 100, LIMIT), number(request, "since", None)
        now, log = self._deployment.hub.now(), self._deployment.publisher.requests
        requests = [log.status(record, now) for record in log.all()]
        requests = [
            status
            for status in requests
            if chosen.takes(status, now) and (since is None or now - status.started <= since)
        ]
        items = ordered(requests, request.args.get("sort", ""), now)
        return _json({"items": items[:limit], "truncated": max(0, len(items) - limit)})

    async def _request(self, request: Request, key: str) -> HTTPResponse:
        record = self._find(request, key)
        now = self._deployment.hub.now()
        return _json(request_item(self._deployment.publisher.requests.status(record, now), now))

    async def _trace(self, request: Request, key: str) -> HTTPResponse:
        record = self._find(request, key)
        return _json(self._deployment.publisher.requests.trace(record, self._deployment.hub.now()))

    async def _metrics(self, request: Request) -> HTTPResponse:
        return raw(self._deployment.publisher.exposition(), content_type=CONTENT_TYPE)

    # -- streams ------------------------------------------------------------------------------------------------------

    async def _watch(self, request: Request) -> None:
        hub = self._deployment.hub
        subscription = hub.subscribe(
            parts=parts(request),
            filter_text=request.args.get("filter", ""),
            hz=number(request, "hz", 4.0) or 0.0,
            readonly=request.ctx.access is Access.READ,
        )
        try:
            self._deployment.publisher.refresh(now_all=True)
            await self._streams.watch(request, subscription)
        finally:
            hub.unsubscribe(subscription)

    async def _events(self, request: Request) -> None:
        since, kind = whole(request, "since", 0), request.args.get("type", "*")
        lines = self._streams.events(self._deployment.events, since, kind, follow=flag(request, "follow"))
        await self._streams.lines(request, lines)

    async def _logs(self, request: Request) -> None:
        known = self._deployment.logs
        name = request.args.get("from", "").replace("/", "-")
        if name and name not in known:
            raise NotFound(f"no process {name!r}", hint=did_you_mean(name, known), kind="process", name=name)
        chosen = {name: known[name]} if name else dict(known)
        tail, since = whole(request, "tail", 100), number(request, "since", None)
        lines = self._streams.logs(chosen, tail=tail, since_s=since, follow=flag(request, "follow"))
        await self._streams.lines(request, lines)

    # -- actions ------------------------------------------------------------------------------------------------------

    async def _cancel(self, request: Request, key: str) -> HTTPResponse:
        def act() -> dict[str, Any]:
            record = self._find(request, key)
            if record.has_ended:
                raise StateConflict(f"request {key} has ended", record.api.state or "", code="already_ended")
            self._deployment.cancel(record.handle)
            return {"id": key, "handle": record.handle, "state": "cancelling"}

        return self._acted(request, act)

    async def _stop(self, request: Request) -> HTTPResponse:
        grace = whole(request, "grace", 0) if "grace" in request.args else None
        now = flag(request, "now")
        return self._act(request, lambda: self._deployment.stop(now=now, reason="asked to stop", grace_s=grace))

    async def _restart(self, request: Request) -> HTTPResponse:
        if flag(request, "rolling"):
            return self._acted(request, lambda: {"operation": self._deployment.operations.restart()})
        return self._act(request, self._deployment.ask_restart)

    async def _set(self, request: Request) -> HTTPResponse:
        values = body(request, {"values": dict}).get("values")
        if not values:
            raise UsageError("no value is given", hint='send {"values": {"max_queue": 64}}')
        return self._acted(request, lambda: self._deployment.operations.set_values(values))

    async def _scale(self, request: Request) -> HTTPResponse:
        fields = body(request, {"replicas": int, "free": list})
        if "replicas" not in fields:
            raise UsageError("the number of replicas is missing", hint='send {"replicas": 2}')
        try:
            free = msgspec.convert(fields.get("free", []), list[FreeDevice])
        except msgspec.ValidationError as error:
            raise UsageError("free is not a list of devices", str(error), "see /v1/openapi.json") from error
        return self._acted(request, lambda: {"operation": self._deployment.operations.scale(fields["replicas"], free)})

    async def _sleep(self, request: Request) -> HTTPResponse:
        fields = body(request, {"level": int, "nodes": list, "wait": int})
        nodes = node_names(fields)

        def act() -> dict[str, Any]:
            level, is_waiting = fields.get("level", 1), bool(fields.get("wait", 0))
            return {"operation": self._deployment.sleep.sleep(level, nodes, is_waiting=is_waiting)}

        return await self._begun(request, act)

    async def _wake(self, request: Request) -> HTTPResponse:
        nodes = node_names(body(request, {"nodes": list}))
        return await self._begun(request, lambda: {"operation": self._deployment.sleep.wake(nodes)})

    async def _begun(self, request: Request, act: Callable[[], dict[str, Any]]) -> HTTPResponse:
        """Begin a sleep or a wake, and answer with its refusal if there is one."""
        begun: list[dict[str, Any]] = []

        def noted() -> dict[str, Any]:
            answer = act()
            begun.append(answer["operation"])
            return answer

        answer = self._acted(request, noted)
        for operation in begun:  # none if the answer is one from before
            await self._deployment.sleep.refused(operation)
        return answer

    async def _load_adapter(self, request: Request) -> HTTPResponse:
        fields = body(request, {"name": str, "folder": str, "rank": int, "base": str})
        if "name" not in fields or "folder" not in fields:
            raise UsageError("the adapter's name or folder is missing", hint='send {"name": "a", "folder": "/path"}')
        return self._acted(request, lambda: {"operation": self._deployment.adapters.load(**fields)})

    async def _unload_adapter(self, request: Request, key: str) -> HTTPResponse:
        return self._acted(request, lambda: {"operation": self._deployment.adapters.unload(key)})

    async def _cordon(self, request: Request, key: str) -> HTTPResponse:
        return self._acted(request, lambda: self._deployment.operations.cordon(rank(key)))

    async def _uncordon(self, request: Request, key: str) -> HTTPResponse:
        return self._acted(request, lambda: self._deployment.operations.uncordon(rank(key)))

    async def _reload(self, request: Request) -> HTTPResponse:
        return self._acted(request, self._deployment.reload)

    async def _log_level(self, request: Request) -> HTTPResponse:
        fields = body(request, {"level": str, "children": list})
        level, names = str(fields.get("level", "")).upper(), [str(name) for name in fields.get("children", [])]
        if level not in LEVELS:
            raise UsageError(f"no log level {level!r}", hint=did_you_mean(level, LEVELS))
        known = [*self._deployment.children, "supervisor"]
        for name in names:
            if name not in known:
                raise NotFound(f"no process {name!r}", hint=did_you_mean(name, known), kind="process", name=name)

        def act() -> dict[str, Any]:
            reached = self._deployment.log_level(level, names) if names != ["supervisor"] else []
            if not names or "supervisor" in names:
                logging.getLogger().setLevel(level)
                reached.append("supervisor")
            return {"level": level, "children": reached}

        return self._acted(request, act)

    async def _record(self, request: Request) -> HTTPResponse:
        fields = body(request, {"name": str, "max_bytes": int})
        return self._acted(request, lambda: self._recordings.begin(**fields).facts(), 201)

    async def _recording(self, request: Request, key: str) -> HTTPResponse | None:
        if not flag(request, "lines"):
            return _json(self._recordings.get(key).facts())
        self._recordings.get(key)
        response = await request.respond(content_type=NDJSON)
        for piece in self._recordings.lines(key):
            await response.send(piece)
        await response.eof()
        return None

    async def _progress(self, request: Request, key: str) -> HTTPResponse:
        recording = self._recordings.get(key)
        recording.progress = json_object(request)
        return _json(recording.facts(), 202)

    async def _erase(self, request: Request, key: str) -> HTTPResponse:
        self._recordings.erase(key)
        return _json({"id": key, "state": "erased"})

    # -- shared -------------------------------------------------------------------------------------------

    def _find(self, request: Request, key: str) -> RequestRecord:
        return find_request(self._deployment.publisher.requests, request, key)

    def _act(self, request: Request, act: Callable[[], None]) -> HTTPResponse:
        def answered() -> dict[str, Any]:
            before = self._deployment.events.number
            act()
            return {"state": self._deployment.state, "event": before}

        return self._acted(request, answered)

    def _acted(self, request: Request, act: Callable[[], dict[str, Any]], status: int = 202) -> HTTPResponse:
        what = f"{request.method} {request.path}?{request.query_string}"
        return _json(self._answers.run(request.headers.get("idempotency-key"), what, act), status)

    async def _admit(self, request: Request) -> HTTPResponse | None:
        """Check the permissions of the peer, whose credentials come from the kernel."""
        request.ctx.access = Access.ALL
        sock = request.transport.get_extra_info("socket") if request.transport else None
        if sock is None:
            return None
        try:
            request.ctx.access = access_of(peer_of(sock), self._gid)
            if request.ctx.access is Access.READ and request.method not in READ_METHODS:
                raise Refused("this peer may only read", "it is a member of the admin group", "ask the owner")
        except Refused as error:
            return _refusal(error)
        return None

    async def _problem(self, request: Request, error: Exception) -> HTTPResponse:
        if isinstance(error, NoRoute):
            error = no_route(request.path, [endpoint.path for endpoint in ENDPOINTS])
        return _refusal(error)


def _refusal(error: Exception) -> HTTPResponse:
    status, body = problem(error)
    return json_response(body, status=status)


def _json(value: Any, status: int = 200) -> HTTPResponse:
    return json_response(value, dumps=as_json, status=status)
