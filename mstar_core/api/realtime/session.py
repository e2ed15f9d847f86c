"""A realtime session: a conversation in a dialect, its events, and its connection while there is one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

from mstar_core.api.errors import Stalled
from mstar_core.api.exchange import Exchange
from mstar_core.api.http.websocket import GOING_AWAY, NORMAL
from mstar_core.api.realtime.event_log import SentEvents
from mstar_core.api.realtime.history import new_id
from mstar_core.api.realtime.settings import RealtimeSettings
from mstar_core.api.realtime.wire.dialect import RealtimeDialect
from mstar_core.errors import MstarError, TimedOut, Unavailable
from mstar_core.messages.telemetry import REALTIME, SessionNews

CLOSE_S: Final = 5.0
"""Longest wait for a client to read why its session ends."""


class EventChannel(Protocol):
    """A connection of a session: a WebSocket, or a WebRTC call."""

    @property
    def is_closed_by_client(self) -> bool:
        """Return whether the client has ended it."""
        ...

    async def receive(self) -> bytes | str:
        """Return the next event. Raises CancelledError at the end of the connection."""
        ...

    async def send(self, message: str) -> None:
        """Send an event. Raises Stalled if the client does not read."""
        ...

    async def close(self, reason: str, code: int = NORMAL) -> None:
        """Close the connection."""
        ...


class RealtimeSession:
    """Owned by `OpenSessions`. Its connection is served by one task at a time; a new one replaces the last."""

    def __init__(self, exchange: Exchange, patch: Mapping[str, Any]) -> None:
        """exchange: of the first connection. patch: fields of a client secret. Raises RequestError."""
        limits = exchange.limits
        self.id = new_id("sess")
        self.key = exchange.key
        self.scope = exchange.scope
        self._clock = exchange.service.clock
        self.sent = SentEvents(self._clock)
        self._began = self._clock()
        self._ends = self._began + limits.realtime_max_s
        self._idle_s = limits.realtime_idle_s
        facts = {
            "id": self.id,
            "object": "realtime.session",
            "expires_at": int(time.time() + limits.realtime_max_s),
        }
        self._dialect = RealtimeDialect(exchange, self.sent, facts, patch)
        self._serving: asyncio.Task[Any] | None = None
        self._socket: EventChannel | None = None

    async def serve(self, exchange: Exchange, socket: EventChannel) -> bool:
        """Serve a connection until it ends, and return whether the session ends with it.

        It does not if another connection has replaced this one, or if the connection was lost.
        """
        task = asyncio.current_task()
        before, self._serving = self._serving, task
        self._socket = socket
        if before is not None:
            before.cancel()
        writer = asyncio.create_task(self._write(exchange, socket), name=f"events of {self.id}")
        try:
            await self._read(socket)
        except asyncio.CancelledError:
            if self._serving is not task:
                await socket.close("replaced by another connection")
                return False
            return socket.is_closed_by_client
        except TimedOut as error:
            await self._finish(socket, error)
            return True
        finally:
            writer.cancel()
            if self._serving is task:
                self._serving = None
        return True

    @property
    def settings(self) -> RealtimeSettings:
        """Return the current settings."""
        return self._dialect.conversation.settings

    @property
    def is_connected(self) -> bool:
        """Return whether a connection is served."""
        return self._serving is not None

    def news(self) -> SessionNews:
        """Return its state for the supervisor."""
        status = self._dialect.conversation.status()
        return SessionNews(
            id=self.id,
            kind=REALTIME,
            speaks=status.speaks,
            began=self._began,
            is_lost=not self.is_connected,
            answers=status.answers,
            interrupts=status.interrupts,
            false_starts=status.false_starts,
            items=status.items,
            request=status.request,
            first_audio_s=status.first_audio_s,
        )

    async def close(self) -> None:
        """Cancel everything that runs, and free events and items at once.

        A client that is still connected gets the reason, and close code 1001.
        """
        if self._serving is not None and self._socket is not None:
            stops = Unavailable("the deployment is stopping", hint="begin a new session later", code="draining")
            await self._finish(self._socket, stops, GOING_AWAY)
        await self._dialect.conversation.close()
        self.sent.clear()

    async def _read(self, socket: EventChannel) -> None:
        while True:
            left = self._ends - self._clock()
            try:
                async with asyncio.timeout(max(0.0, min(self._idle_s, left))):
                    message = await socket.receive()
            except TimeoutError:
                is_old = self._clock() >= self._ends
                why = "the session reached its maximum time" if is_old else f"no event came for {self._idle_s:g} s"
                raise TimedOut(why, hint="begin a new session", code="session_expired") from None
            self.sent.forget_received()
            await self._dialect.handle(message)
            await asyncio.sleep(0)  # events that wait already would starve other sessions

    async def _write(self, exchange: Exchange, socket: EventChannel) -> None:
        try:
            while True:
                await socket.send((await self.sent.next()).decode())
        except Stalled:
            exchange.abort(drops=True)

    async def _finish(self, socket: EventChannel, error: MstarError, close_code: int = NORMAL) -> None:
        """Send an error as the last event, and close the connection with its code as the reason."""
        self._dialect.end(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.sent.all_read()
        await socket.close(error.code, close_code)
