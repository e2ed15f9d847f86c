"""Fakes of deployments behind a gateway: HTTP servers that record what they get, and a fleet of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from mstar_core.errors import Unavailable
from mstar_core.gateway.parts import LoadProgress, ModelState, ModelStatus, Replica
from mstar_core.gateway.serve_file import ServeFile

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


async def serve_on_port(server: web.Server[Any], port: int = 0) -> tuple[str, Callable[[], Awaitable[None]]]:
    """Serve on a port, 0 for a free one. Returns the URL and the function that stops it."""
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}", runner.cleanup


@dataclass(slots=True)
class Received:
    """One request as a fake deployment got it."""

    method: str
    path: str
    headers: Any
    body: bytes


@dataclass(slots=True)
class FakeDeployment:
    """An HTTP server that answers as configured. handler: makes the answers, else each request gets its own facts.

    left: set when a client closed its connection before the end of an answer.
    """

    model: str
    name: str = ""
    handler: Handler | None = None
    aliases: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("text",)
    key: str | None = None
    is_local: bool = True
    received: list[Received] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    state: ModelState = ModelState.READY
    _close: Callable[[], Awaitable[None]] | None = None

    @property
    def replica(self) -> Replica:
        """The deployment as the door knows it."""
        name = self.name or self.model
        return Replica(model=self.model, deployment=name, url=self.url, key=self.key, is_local=self.is_local)

    async def start(self, port: int = 0) -> None:
        """Listen on a port, 0 for a free one."""
        server: web.Server[Any] = web.Server(self._handle, handler_cancellation=True, auto_decompress=False)
        self.url, self._close = await serve_on_port(server, port)

    async def close(self) -> None:
        """Stop; later connections are refused."""
        if self._close is not None:
            await self._close()
            self._close = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            if self.handler is not None:
                return await self.handler(request)
            return await self.echo(request)
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def echo(self, request: web.BaseRequest) -> web.StreamResponse:
        """Record a request and answer with its facts."""
        body = await request.content.read()
        self.received.append(Received(request.method, request.raw_path, request.headers.copy(), body))
        if request.path == "/v1/models":
            names = {"id": self.name or self.model, "aliases": [f"{self.model}-weights"]}
            card = {**names, "object": "model", "output_modalities": self.outputs}
            return web.json_response({"object": "list", "data": [card]})
        return web.json_response({"by": self.name or self.model, "size": len(body)})


@dataclass(slots=True)
class FakeFleet:
    """A fleet whose models are ready, or wait until `wake` is set. held: replicas that are in use now."""

    fakes: list[FakeDeployment]
    held: Counter[str] = field(default_factory=Counter)
    wake: asyncio.Event | None = None
    progress: LoadProgress = field(default_factory=lambda: LoadProgress(state=ModelState.LOADING, text="weights"))
    error: Unavailable | None = None

    async def start(self) -> None:
        """Do nothing."""

    async def close(self, *, is_final: bool) -> None:
        """Do nothing."""

    async def apply(self, serve: ServeFile) -> None:
        """Do nothing."""

    def names(self) -> Sequence[str]:
        """Return the names of the models."""
        return sorted({fake.model for fake in self.fakes})

    def models(self) -> Sequence[ModelStatus]:
        """Return one status for the fakes of each model."""
        return [self._status(name, [fake for fake in self.fakes if fake.model == name]) for name in self.names()]

    def _status(self, name: str, fakes: list[FakeDeployment]) -> ModelStatus:
        replicas = tuple(fake.replica for fake in fakes)
        return ModelStatus(name=name, aliases=fakes[0].aliases, state=fakes[0].state, replicas=replicas)

    def resolve(self, name: str) -> str | None:
        """Return the model of a name or alias."""
        return next((fake.model for fake in self.fakes if name == fake.model or name in fake.aliases), None)

    async def ready(self, model: str, progress: Callable[[LoadProgress], None]) -> Sequence[Replica]:
        """Return the replicas, once `wake` is set."""
        if self.wake is not None and not self.wake.is_set():
            progress(self.progress)
            await self.wake.wait()
        if self.error is not None:
            raise self.error
        return [fake.replica for fake in self.fakes if fake.model == model]

    @contextmanager
    def using(self, replica: Replica) -> Iterator[None]:
        """Count the use."""
        self.held[replica.deployment] += 1
        try:
            yield
        finally:
            self.held[replica.deployment] -= 1
