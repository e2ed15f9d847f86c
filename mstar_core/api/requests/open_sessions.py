"""Sessions that are open, with and without a connection. Owned by the service, used by /v1/realtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from mstar_core.errors import NotFound, Overloaded
from mstar_core.messages.telemetry import SessionNews

KEPT_S: Final = 60.0
"""Time for which a session without a connection is kept."""

CALM_S: Final = 1.0
"""Time after the last end of a session at which their memory is free: handlers still hold sessions that just ended."""

RETRY_S: Final = 5
"""Time after which a client that found no place may try again."""


class OpenSession(Protocol):
    """A session. key: of its client."""

    @property
    def id(self) -> str: ...

    @property
    def key(self) -> str: ...

    def news(self) -> SessionNews:
        """Return its state for the supervisor."""

    async def close(self) -> None: ...


class OpenSessions:
    """Sessions by id. One without a connection ends after `kept_s`, or when another one needs its place.

    on_freed: called `CALM_S` after the last end of a session, on a thread.
    """

    def __init__(
        self, most: int, kept_s: float = KEPT_S, on_freed: Callable[[], None] = lambda: None, calm_s: float = CALM_S
    ) -> None:
        self.most = most
        self.kept_s = kept_s
        self._sessions: dict[str, OpenSession] = {}
        self._left: dict[str, asyncio.TimerHandle] = {}  # of sessions without a connection, the oldest first
        self._closing: set[asyncio.Task[None]] = set()
        self._on_freed = on_freed
        self._calm_s = calm_s
        self._calm: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[OpenSession]:
        return iter(self._sessions.values())

    @property
    def connected(self) -> int:
        """Return the number of sessions that have a connection."""
        return len(self._sessions) - len(self._left)

    def check_room(self) -> None:
        """Raise Overloaded if every place is taken by a session with a connection."""
        if self.connected >= self.most:
            raise Overloaded(
                f"{self.most} realtime sessions are open",
                hint="close one, or retry later",
                code="session_limit",
                retry_after_s=RETRY_S,
            )

    def add(self, session: OpenSession) -> None:
        """Hold a session that has a connection. Raises Overloaded."""
        self.check_room()
        if len(self._sessions) >= self.most:
            self.end(next(iter(self._left)))
        self._sessions[session.id] = session

    def find(self, session_id: str, key: str) -> OpenSession:
        """Return the session of an id that `key` began. Raises NotFound."""
        session = self._sessions.get(session_id)
        if session is None or session.key != key:
            raise NotFound(
                f"there is no session {session_id[:80]!r}",
                hint=f"a session is kept {self.kept_s:g} s after its connection was lost; begin a new one",
                code="session_not_found",
                field="resume",
            )
        return session

    def join(self, session: OpenSession) -> None:
        """Note that a session has a connection again."""
        timer = self._left.pop(session.id, None)
        if timer is not None:
            timer.cancel()

    def leave(self, session: OpenSession) -> None:
        """Note that a session has lost its connection."""
        if session.id in self._sessions:
            self.join(session)
            self._left[session.id] = asyncio.get_running_loop().call_later(self.kept_s, self.end, session.id)

    def end(self, session_id: str) -> None:
        """End a session, unless it has ended."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        self.join(session)
        task = asyncio.get_running_loop().create_task(session.close(), name=f"end of {session_id}")
        self._closing.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if self._calm is not None:
            self._calm.cancel()
        loop = task.get_loop()
        self._calm = loop.call_later(self._calm_s, loop.run_in_executor, None, self._on_freed)

    async def close(self) -> None:
        """End all sessions, and wait for their ends."""
        for session_id in list(self._sessions):
            self.end(session_id)
        if self._closing:
            await asyncio.wait(set(self._closing))
            await asyncio.sleep(0)  # the callbacks of their ends
        if self._calm is not None:
            self._calm.cancel()
