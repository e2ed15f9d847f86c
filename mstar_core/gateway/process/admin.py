"""Admin socket of a gateway: its head and models, and actions on them. The socket's mode keeps other users out."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web

from mstar_core.admin.access import Access, access_of, peer_of
from mstar_core.config.files.parse import parse
from mstar_core.errors import MstarError, NotFound, Refused, UsageError, did_you_mean
from mstar_core.gateway.door.door import Door
from mstar_core.gateway.fleet.hosts.names import host_of
from mstar_core.gateway.parts import Fleet, Gate, ModelState, ModelStatus
from mstar_core.gateway.process.keeper import HANDOVER
from mstar_core.gateway.process.spec import GatewaySpec
from mstar_core.gateway.serve_file import ModelEntry, ServeFile, read_entry
from mstar_core.gateway.sleep_rule import can_sleep, caution_of
from mstar_core.host.hardware.gpus import count_gpus
from mstar_core.version import __version__

API: Final = 1
log = logging.getLogger("mstar.gateway")

Answer = Callable[[web.Request], Awaitable[Any]]


class ManagedGateway(Protocol):
    """The worker as its admin socket needs it. grace_s: time limit of its drain. reason: of its state."""

    spec: GatewaySpec
    door: Door
    fleet: Fleet
    gate: Gate
    grace_s: float
    started: float
    reason: str

    @property
    def is_stopping(self) -> bool: ...

    async def reload(self) -> None: ...

    async def take(self, serve: ServeFile) -> None: ...


class AdminRoutes:
    """Routes of the admin socket. Made by the worker. It has the paths of a deployment's for what both can say."""

    def __init__(self, worker: ManagedGateway) -> None:
        self._worker = worker

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=64 * 1024)
        get: Mapping[str, Answer] = {
            "/v1/": self._head,
            "/v1/snapshot": self._snapshot,
            "/v1/models": self._models,
            "/v1/tenants": self._tenants,
            "/v1/health": self._health,
            "/v1/ready": self._health,
            "/v1/config": self._config,
        }
        post: Mapping[str, Answer] = {
            "/v1/models": self._add,
            "/v1/deployment/stop": self._stop,
            "/v1/deployment/reload": self._reload,
            "/v1/deployment/restart": self._restart,
        }
        app.add_routes([web.get(path, self._answering(answer)) for path, answer in get.items()])
        app.add_routes([web.post(path, self._answering(answer)) for path, answer in post.items()])
        app.add_routes([web.delete("/v1/models/{name}", self._answering(self._remove))])
        app.add_routes([web.get("/v1/metrics", self._metrics)])
        return app

    def _answering(self, answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            try:
                check_peer(request)
                return _json(await answer(request))
            except MstarError as error:
                body = {"code": error.code, "title": error.title, "detail": error.detail, "hint": error.hint}
                return _json(body, error.status)
            except Exception:
                log.exception("a call of the admin socket failed")
                return _json({"code": "internal_error", "title": "the gateway could not answer"}, 500)

        return handle

    async def _head(self, request: web.Request) -> dict[str, Any]:
        return {"api": API, "min_api": API, "features": ["gateway"], **self._facts()}

    async def _snapshot(self, request: web.Request) -> dict[str, Any]:
        tenants = await self._tenant_items()
        head = {"deployment": self._facts(), "models": self._statuses(), "tenants": tenants}
        return {**head, "children": {}, "ranks": {}, "hosts": {}}

    async def _tenants(self, request: web.Request) -> dict[str, Any]:
        return {"items": await self._tenant_items()}

    async def _tenant_items(self) -> list[dict[str, Any]]:
        return [asdict(standing) for standing in await self._worker.gate.standings()]

    async def _models(self, request: web.Request) -> dict[str, Any]:
        return {"items": self._statuses()}

    async def _health(self, request: web.Request) -> dict[str, Any]:
        return {"status": "draining" if self._worker.is_stopping else "healthy"}

    async def _config(self, request: web.Request) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self._worker.spec.serve)
        return {"file": self._worker.spec.serve.path, "serve": plain}

    async def _metrics(self, request: web.Request) -> web.Response:
        text = await self._worker.door.metrics_text()
        return web.Response(body=text, content_type="text/plain", charset="utf-8")

    async def _add(self, request: web.Request) -> dict[str, Any]:
        """Add a model, or change one. Body: `name`, and `entry` as in the file's `models`."""
        fields = await _object(request)
        name, entry = fields.get("name"), fields.get("entry")
        if not isinstance(name, str) or not isinstance(entry, str | dict):
            raise UsageError("name or entry is missing", hint='send {"name": "llm", "entry": {"target": "llm:mini"}}')
        place = parse(msgspec.json.encode(entry).decode(), "serve add")  # JSON is YAML
        added = read_entry(name, place)
        serve = self._worker.spec.serve
        taken = {word: model.name for model in serve.models.values() for word in (model.name, *model.aliases)}
        clash = next((word for word in (name, *added.aliases) if taken.get(word, name) != name), None)
        if clash is not None:
            raise UsageError(f"{clash!r} names {taken[clash]!r} already", hint="choose another name")
        await self._worker.take(msgspec.structs.replace(serve, models={**serve.models, name: added}))
        caution = caution_of(added, can_sleep(added, serve, has_gpu=count_gpus() > 0))
        return {"name": name, "entry": msgspec.to_builtins(added), "caution": caution}

    async def _remove(self, request: web.Request) -> dict[str, Any]:
        name = request.match_info["name"]
        models: dict[str, ModelEntry] = dict(self._worker.spec.serve.models)
        if name not in models:
            hint = did_you_mean(name, models) if models else "its models are running deployments: mstarctl down NAME"
            raise NotFound(f"the gateway has no entry {name!r}", hint=hint, kind="model", name=name)
        del models[name]
        serve = self._worker.spec.serve
        # A file without models means all running deployments; removing the last one must not begin to serve others.
        await self._worker.take(msgspec.structs.replace(serve, models=models, discover=serve.discovers))
        return {"name": name, "state": "removed"}

    async def _stop(self, request: web.Request) -> dict[str, Any]:
        if request.query.get("now"):
            self._worker.grace_s = 0.0
        elif "grace" in request.query:
            grace = request.query["grace"]
            if not grace.isdecimal():
                raise UsageError(f"grace is {grace!r}", hint="a whole number of seconds")
            self._worker.grace_s = float(grace)
        os.kill(os.getppid(), signal.SIGTERM)
        return {"state": "draining"}

    async def _reload(self, request: web.Request) -> dict[str, Any]:
        await self._worker.reload()
        return {"file": self._worker.spec.serve.path, "models": sorted(self._worker.spec.serve.models)}

    async def _restart(self, request: web.Request) -> dict[str, Any]:
        os.kill(os.getppid(), HANDOVER)
        return {"state": "restarting", "pid": os.getpid()}

    def _statuses(self) -> list[dict[str, Any]]:
        return [status_item(status) for status in self._worker.fleet.models()]

    def _facts(self) -> dict[str, Any]:
        """Return the gateway as `ps` shows a deployment."""
        worker = self._worker
        statuses = worker.fleet.models()
        return {
            "name": worker.spec.name,
            "model": "gateway",
            "weights": None,
            "state": "draining" if worker.is_stopping else "ready",
            "reason": worker.reason,
            "host": worker.spec.serve.host,
            "port": worker.spec.serve.port,
            "endpoint": worker.spec.url,
            "pid": os.getppid(),
            "worker": os.getpid(),
            "age_s": round(time.monotonic() - worker.started, 3),
            "running": worker.door.in_flight,
            "waiting": sum(status.queued for status in statuses),
            "ranks": None,
            "restarts": 0,
            "config": worker.spec.serve.path,
            "log_dir": worker.spec.log_dir,
            "versions": {"mstarctl": __version__},
            "cause": None,
            "last_failure": None,
            "failures": [],
            "last_event": 0,
            "models": {str(state): sum(s.state is state for s in statuses) for state in ModelState},
        }


def status_item(status: ModelStatus) -> dict[str, Any]:
    """Return a model's status as data."""
    return {
        "name": status.name,
        "aliases": list(status.aliases),
        "state": str(status.state),
        "replicas": [
            {"deployment": each.deployment, "url": each.url, "host": host_of(each.deployment)}
            for each in status.replicas
        ],
        "held": dict(status.held),
        "totals": dict(status.totals),
        "running": status.running,
        "queued": status.queued,
        "loads": status.loads,
        "wakes": status.wakes,
        "sleep_level": status.sleep_level,
        "reason": status.reason,
        "can_sleep": status.can_sleep,
        "caution": status.caution,
        "config": status.config,
        "places": [asdict(each) for each in status.places],
        "progress": None if status.progress is None else asdict(status.progress),
    }


def check_peer(request: web.Request) -> None:
    """Raise Refused for another user, whose credentials come from the kernel."""
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    if sock is not None and access_of(peer_of(sock), None) is not Access.ALL:
        raise Refused("this gateway belongs to another user", hint="ask its owner")


async def _object(request: web.Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await request.read())
    except msgspec.DecodeError as error:
        raise UsageError("the body is not JSON", str(error)) from error
    if not isinstance(body, dict):
        raise UsageError("the body must be a JSON object")
    return body


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
