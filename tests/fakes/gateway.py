"""Gateways in front of fakes: a door with the session of a client, and one that commands find by its name."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from mstar_core.gateway.door.door import Door
from mstar_core.gateway.process.admin import AdminRoutes
from mstar_core.gateway.process.spec import GatewaySpec
from mstar_core.gateway.serve_file import ServeFile
from mstar_core.host.run_dir import RunDirectory
from mstarctl.client.log_dirs import new_log_dir
from tests.fakes.deployments import FakeDeployment, FakeFleet, serve_on_port
from tests.fakes.open_gate import OpenGate

Opened = Callable[..., Awaitable["Gateway"]]


class Gateway:
    """A door that listens, its fakes, and a client's session. url: of the door."""

    def __init__(self, door: Door, fleet: FakeFleet, url: str, session: aiohttp.ClientSession) -> None:
        self.door = door
        self.fleet = fleet
        self.url = url
        self.session = session

    async def json(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """Send a request and return status and JSON."""
        async with self.session.request(method, f"{self.url}{path}", **options) as response:
            return response.status, await response.json(content_type=None)

    async def text(self, method: str, path: str, **options: Any) -> tuple[int, str]:
        """Send a request and return status and text."""
        async with self.session.request(method, f"{self.url}{path}", **options) as response:
            return response.status, await response.text()


@dataclass(frozen=True, slots=True)
class HostedGateway:
    """A gateway that commands of this process find by its name. url: of its door."""

    name: str
    url: str
    log_dir: Path


@contextmanager
def hosted_gateway(name: str, *fakes: FakeDeployment) -> Iterator[HostedGateway]:
    """Run a door and its admin socket in a thread, with the run directory of a gateway. A fake with a URL runs already.

    The folders are those of the environment, MSTAR_RUNTIME_DIR and XDG_STATE_HOME.
    """
    run, log_dir = RunDirectory.of_gateway(name), new_log_dir(name)
    run.create()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    lock = run.acquire()
    started, close = asyncio.run_coroutine_threadsafe(_started(run, log_dir, fakes), loop).result(30)
    try:
        yield started
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
        os.close(lock)
        run.remove()


async def _started(
    run: RunDirectory, log_dir: Path, fakes: Sequence[FakeDeployment]
) -> tuple[HostedGateway, Callable[[], Awaitable[None]]]:
    closers: list[Callable[[], Awaitable[object]]] = []
    for fake in fakes:
        if not fake.url:
            await fake.start()
            closers.append(fake.close)
    door = Door(FakeFleet(list(fakes)), OpenGate(), ServeFile(), comment_s=(0.0, 0.0))
    await door.start()
    url, close_door = await serve_on_port(web.Server(door.handle, handler_cancellation=True, auto_decompress=False))
    spec = GatewaySpec(
        name=run.name,
        run_dir=str(run.path),
        log_dir=str(log_dir),
        state_dir=str(log_dir),
        serve=ServeFile(port=int(url.rpartition(":")[2])),
    )
    run.spec.write_bytes(spec.encode())
    admin = web.AppRunner(AdminRoutes(_Worker(spec, door)).app(), shutdown_timeout=0.1)
    await admin.setup()
    await web.UnixSite(admin, str(run.admin_socket)).start()
    closers.extend([door.close, close_door, admin.cleanup])

    async def close() -> None:
        for each in reversed(closers):
            await each()

    return HostedGateway(run.name, url, log_dir), close


class _Worker:
    """The worker as the admin socket reads it."""

    def __init__(self, spec: GatewaySpec, door: Door) -> None:
        self.spec, self.door, self.fleet, self.gate = spec, door, door.fleet, door.gate
        self.grace_s, self.started, self.reason, self.is_stopping = 0.0, time.monotonic(), "", False

    async def reload(self) -> None:
        """Do nothing."""

    async def take(self, serve: ServeFile) -> None:
        """Do nothing."""
