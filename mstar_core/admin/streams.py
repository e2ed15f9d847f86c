"""NDJSON streams of the admin socket: watches, logs, events. One object per line, a heartbeat every two seconds.

A slow reader affects only itself: nothing is buffered for it, and it is disconnected after 30 s.
"""

from __future__ import annotations

import asyncio
import fnmatch
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from mstar_core.admin.messages import as_json
from mstar_core.observe.frames import BEAT_S, encode

if TYPE_CHECKING:
    from sanic.request import Request

    from mstar_core.observe.hub import Subscription
    from mstar_core.supervisor.log_file import LogFile

BLOCKED_S: Final = 30.0
SEND_BUFFER: Final = 256 * 1024
NDJSON: Final = "application/x-ndjson; charset=utf-8"


Line = dict[str, Any] | None
"""An object of a stream, None for a heartbeat."""


class NdjsonStreams:
    """Sends streams until the server closes. Owned by the admin server. blocked_s: time limit of one write."""

    def __init__(self, blocked_s: float = BLOCKED_S) -> None:
        self._closing = asyncio.Event()
        self._blocked_s = blocked_s

    def close(self) -> None:
        """End every stream."""
        self._closing.set()

    async def watch(self, request: Request, subscription: Subscription) -> None:
        """Send a subscription's frames at its rate until the reader disconnects."""
        bound_buffer(request)
        response = await request.respond(content_type=NDJSON)
        while not self._closing.is_set():
            frames = subscription.frames()
            if frames and not await self._send(request, response, b"".join(encode(frame) for frame in frames)):
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), 1 / subscription.hz)
        await response.eof()

    async def lines(self, request: Request, lines: AsyncIterator[Line]) -> None:
        """Send objects as they arrive."""
        bound_buffer(request)
        response = await request.respond(content_type=NDJSON)
        async for line in lines:
            data = (as_json({"beat": True} if line is None else line) + "\n").encode()
            if self._closing.is_set() or not await self._send(request, response, data):
                break
        if not self._closing.is_set() or request.transport is not None:
            await response.eof()

    async def _send(self, request: Request, response: Any, data: bytes) -> bool:
        try:
            await asyncio.wait_for(response.send(data), self._blocked_s)
        except TimeoutError:
            transport: Any = request.transport
            if transport is not None:
                transport.abort()
            return False
        return True

    async def events(self, feed: Any, since: int, kind: str, *, follow: bool) -> AsyncIterator[Line]:
        """Yield events after number `since` whose type matches the glob `kind`."""
        while True:
            for event in feed.since(since):
                since = event["n"]
                if fnmatch.fnmatchcase(str(event["type"]), kind):
                    yield event
            if not follow or self._closing.is_set():
                return
            try:
                await asyncio.wait_for(feed.wait(), BEAT_S)
            except TimeoutError:
                yield None

    async def logs(
        self, logs: Mapping[str, LogFile], *, tail: int, since_s: float | None, follow: bool
    ) -> AsyncIterator[Line]:
        """Yield lines of these logs: the last `tail` of each within `since_s`, then new ones with `follow`."""
        wake = asyncio.Event()
        for log in logs.values():
            log.listeners.add(wake)
        try:
            seen: dict[str, int] = {}
            for name, log in logs.items():
                seen[name] = log.lines
                for line in list(log.tail)[-tail:] if tail else []:
                    if since_s is None or is_recent(line, since_s):
                        yield {"from": name, "line": line}
            while follow and not self._closing.is_set():
                try:
                    await asyncio.wait_for(wake.wait(), BEAT_S)
                except TimeoutError:
                    yield None
                wake.clear()
                for name, log in logs.items():
                    kept = list(log.tail)
                    new = min(log.lines - seen[name], len(kept))
                    seen[name] = log.lines
                    for line in kept[len(kept) - new :]:
                        yield {"from": name, "line": line}
        finally:
            for log in logs.values():
                log.listeners.discard(wake)


def bound_buffer(request: Request) -> None:
    """Limit the kernel's send buffer: its default would hold megabytes of stale frames."""
    sock = request.transport.get_extra_info("socket") if request.transport is not None else None
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)


def is_recent(line: str, since_s: float) -> bool:
    """Return whether a log line was written in the last `since_s` seconds. True for a line without a time."""
    try:
        written = datetime.fromisoformat(json.loads(line)["time"]).timestamp()
    except (ValueError, TypeError, KeyError):
        return True
    return time.time() - written <= since_s
