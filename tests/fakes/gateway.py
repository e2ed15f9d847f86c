"""A door of the gateway that listens, with its fakes and the session of a client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from mstar_core.gateway.door.door import Door
from tests.fakes.deployments import FakeFleet

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
