"""Fake deployment that reports requests on an admin socket: the frames of the real hub, and a log without a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from mstar_core.observe.frames import DeploymentStatus, RequestStatus, encode
from mstar_core.observe.hub import TelemetryHub
from mstar_core.observe.request_log import request_item


@dataclass(slots=True)
class UsageReports:
    """A deployment whose requests the test begins and ends. asked: paths of its requests."""

    boot: str = "boot-1"
    slots: int = 4
    age_s: float = 3600.0
    hub: TelemetryHub = field(init=False)
    log: dict[int, RequestStatus] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hub = TelemetryHub(self.boot, "fake")
        self.hub.head(DeploymentStatus(name="fake", state="ready", slots=self.slots))

    def report(self, request: str, *, handle: int | None = None, ended: float | None = 2.0, **figures: Any) -> None:
        """Report a request; by default one that has ended."""
        number = len(self.log) + 1 if handle is None else handle
        state = "run" if ended is None else "finished"
        status = RequestStatus(id=request, handle=number, state=state, started=1.0, ended=ended, **figures)
        self.log[number] = status
        self.hub.put("requests", str(number), status)

    @asynccontextmanager
    async def serve(self, path: Path) -> AsyncIterator[None]:
        """Serve the admin socket during the block."""
        app = web.Application()
        app.router.add_get("/v1/", self._head)
        app.router.add_get("/v1/requests", self._requests)
        app.router.add_get("/v1/requests/{id}", self._request)
        app.router.add_get("/v1/watch", self._watch)
        runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await runner.setup()
        await web.UnixSite(runner, str(path)).start()
        try:
            yield
        finally:
            await runner.cleanup()

    async def _head(self, request: web.Request) -> web.Response:
        return web.json_response({"boot": self.boot, "age_s": self.age_s})

    async def _requests(self, request: web.Request) -> web.Response:
        items = [request_item(each, 0.0) for each in self.log.values()]
        return web.Response(body=msgspec.json.encode({"items": items, "truncated": 0}))

    async def _request(self, request: web.Request) -> web.Response:
        self.asked.append(request.match_info["id"])
        found = [each for each in self.log.values() if each.id == request.match_info["id"]]
        if not found:
            raise web.HTTPNotFound
        return web.Response(body=msgspec.json.encode(request_item(found[-1], 0.0)))

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        watcher = self.hub.subscribe(parts=("requests",), hz=10.0)
        try:
            while True:
                frames = watcher.frames()
                if frames:
                    await response.write(b"".join(encode(frame) for frame in frames))
                await asyncio.sleep(0.01)
        finally:
            self.hub.unsubscribe(watcher)
