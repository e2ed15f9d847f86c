"""Admin socket of a deployment as the gateway reads it: its requests once, then their changes as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import aiohttp
import msgspec

from mstar_core.observe.frames import RequestStatus

HZ: Final = 4
SILENCE_S: Final = 6.0
"""Three heartbeats of a watch; a supervisor that is silent for longer is unreachable."""

ROWS: Final = 1000
"""Most rows of one answer. The log keeps twice as many ended requests, so it is read from both ends."""

FAULTS: Final = (OSError, LookupError, TypeError, ValueError, EOFError, aiohttp.ClientError, msgspec.MsgspecError)
"""Errors of a link whose deployment has ended or does not answer."""


@dataclass(frozen=True, slots=True)
class ObservedStart:
    """One start of a deployment. boot: its id. age_s: seconds since then."""

    boot: str
    age_s: float


@dataclass(slots=True)
class Watched:
    """Requests of a deployment by their keys, as the frames of a watch tell. slots: requests that it runs at once.

    changed: keys that changed since they were taken. gone: requests that left the view before they had ended.
    """

    boot: str = ""
    slots: int = 0
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    gone: list[dict[str, Any]] = field(default_factory=list)

    def apply(self, frame: Mapping[str, Any]) -> None:
        """Apply one frame (docs/admin-api.md)."""
        match frame.get("k"):
            case "hello":
                if frame["boot"] != self.boot:
                    self.requests.clear()
                self.boot = frame["boot"]
            case "snapshot":
                self.slots = int((frame.get("deployment") or {}).get("slots", 0))
                self.requests = dict(frame.get("requests", {}))
                self.changed.update(self.requests)
            case "delta":
                self.slots = int(frame.get("deployment", {}).get("slots", self.slots))
                for key, changes in frame.get("set", {}).get("requests", {}).items():
                    self.requests[key] = {**self.requests.get(key, {}), **changes}
                    self.changed.add(key)
                for key in frame.get("del", {}).get("requests", ()):
                    left = self.requests.pop(key, None)
                    self.changed.discard(key)
                    if left is not None and left.get("ended") is None:
                        self.gone.append(left)

    def take(self) -> list[RequestStatus]:
        """Return the requests that changed since the last call, and those that ended with their api."""
        changed = [self.requests[key] for key in self.changed if key in self.requests]
        changed += [{**left, "ended": left.get("started", 0.0)} for left in self.gone]
        self.changed.clear()
        self.gone.clear()
        return [msgspec.convert(each, type=RequestStatus) for each in changed]


class AdminLink:
    """Connection to one admin socket. Every method raises one of FAULTS if the deployment does not answer."""

    def __init__(self, socket: Path) -> None:
        timeout = aiohttp.ClientTimeout(sock_connect=SILENCE_S, sock_read=SILENCE_S)
        self._session = aiohttp.ClientSession(
            "http://mstar", connector=aiohttp.UnixConnector(path=str(socket)), timeout=timeout
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def start(self) -> ObservedStart:
        """Return the current start of the deployment."""
        head = await self._json("/v1/")
        return ObservedStart(boot=str(head["boot"]), age_s=float(head.get("age_s") or 0.0))

    async def requests(self) -> list[RequestStatus]:
        """Return all requests that the deployment remembers."""
        items: dict[int, dict[str, Any]] = {}
        for order in ("ended", "-ended"):
            answer = await self._json(f"/v1/requests?limit={ROWS}&sort={order}")
            items.update({item["handle"]: item for item in answer["items"]})
            if not answer["truncated"]:
                break
        return [msgspec.convert(item, type=RequestStatus) for item in items.values()]

    async def request(self, request: str) -> RequestStatus | None:
        """Return one request, None if the deployment does not know it."""
        async with self._session.get(f"/v1/requests/{quote(request, safe='')}") as response:
            if response.status == 404:
                return None
            response.raise_for_status()
            return msgspec.json.decode(await response.read(), type=RequestStatus)

    async def watch(self) -> AsyncIterator[Watched]:
        """Yield the requests after every frame, each time the same object. Ends with the deployment."""
        watched = Watched()
        async with self._session.get(f"/v1/watch?hz={HZ}&parts=requests") as response:
            response.raise_for_status()
            rest = b""
            async for piece in response.content.iter_any():
                *lines, rest = (rest + piece).split(b"\n")
                for line in filter(None, lines):
                    watched.apply(msgspec.json.decode(line))
                if lines:
                    yield watched

    async def _json(self, path: str) -> dict[str, Any]:
        async with self._session.get(path) as response:
            response.raise_for_status()
            answer: dict[str, Any] = msgspec.json.decode(await response.read())
            return answer
