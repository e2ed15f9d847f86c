"""A door in front of fake deployments, all in the test's own process and loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mstar_core.gateway.door.door import Door
from mstar_core.gateway.parts import Gate
from mstar_core.gateway.serve_file import ServeFile
from tests.fakes.deployments import FakeDeployment, FakeFleet, serve_on_port
from tests.fakes.gateway import Gateway, Opened
from tests.fakes.open_gate import OpenGate


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    """Open doors in front of fake deployments: `await opened(deployments, gate=..., **serve)`."""
    closers: list[Callable[[], Awaitable[object]]] = []

    async def open_door(*fakes: FakeDeployment, gate: Gate | None = None, **serve: Any) -> Gateway:
        for fake in fakes:
            await fake.start()
            closers.append(fake.close)
        fleet = FakeFleet(list(fakes))
        door = Door(fleet, gate or OpenGate(), ServeFile(**serve), comment_s=(0.0, 0.0))
        await door.start()
        url, close = await serve_on_port(web.Server(door.handle, handler_cancellation=True, auto_decompress=False))
        session = aiohttp.ClientSession(auto_decompress=False, cookie_jar=aiohttp.CookieJar(unsafe=True))
        closers.extend([close, door.close, session.close])
        return Gateway(door, fleet, url, session)

    yield open_door
    for close in reversed(closers):
        await close()
    await asyncio.sleep(0)
