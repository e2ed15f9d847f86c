"""Listening socket of the api: accepts connections up to a limit, and evicts idle ones at the limit. Owned by `main`.

asyncio's own server retries a failed accept() as often as its backlog is long, and logs each try.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Final

from sanic import Sanic

from mstar_core.api.handover.keeper import MOST_ADOPTIONS, RESET, Keeper, KeptConnection
from mstar_core.api.http.connection import HEAD_S, Connection
from mstar_core.api.http.websocket import dismiss
from mstar_core.host.tls.plain_http import refuse, speaks_http

BACKLOG: Final = 1024
ACCEPTS: Final = 64
"""Connections accepted per turn of the event loop, so that a flood of them does not stop the others."""

RESERVED_FDS: Final = 128
"""Descriptors that connections leave for everything else: processes, tensors, spool files."""

LEAST: Final = 8
EVICTED_SHARE: Final = 32
"""At the limit, one in so many connections is closed at once, because choosing them visits all."""

RETRY_S: Final = 1.0
LOG_S: Final = 60.0
EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger("mstar.api.listener")


def allowed_connections(configured: int, descriptors: int, used: int) -> int:
    """Return the limit of connections. descriptors: limit of the process; used: those open now."""
    return max(LEAST, min(configured, descriptors - used - min(RESERVED_FDS, (descriptors - used) // 2)))


class Listener:
    """Accepts connections. limit: most connections at a time, handshakes included.

    keeper: leaves copies of plain connections with the supervisor. A TLS session ends with its process.
    """

    def __init__(
        self,
        app: Sanic[Any, Any],
        sock: socket.socket,
        limit: int,
        tls: ssl.SSLContext | None = None,
        *,
        keeper: Keeper | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connections: set[Connection] = set()
        self.limit = limit
        self.tls = tls
        self._keeper = keeper
        self._app = app
        self._socket = sock
        self._clock = clock
        self._state: dict[str, Any] = {}
        self._handshakes: dict[asyncio.Task[None], tuple[socket.socket, KeptConnection | None]] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._next_log: dict[str, float] = {}
        self._is_closed = self._is_handed_over = False

    def start(self) -> None:
        """Listen, and accept connections on the running loop."""
        self._socket.listen(BACKLOG)
        self._resume()

    def stop(self) -> None:
        """Accept no more connections and drop unfinished handshakes. Open connections stay."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pause()
        for task in list(self._handshakes):
            task.cancel()

    def hand_over(self) -> int:
        """Leave new connections in the listening socket, for its next owner, and close idle ones.

        Returns the number of connections whose request has not been answered yet. Call it again until none is left.
        """
        if not self._is_handed_over and not self._is_closed:
            self._is_handed_over = True
            self._pause()
        for connection in [each for each in self.connections if each.has_served and each.is_idle]:
            connection.drop()
            self.connections.discard(connection)
        return len(self.connections) + len(self._handshakes)

    def take_back(self) -> None:
        """Accept connections again after `hand_over`."""
        if self._is_handed_over:
            self._is_handed_over = False
            self._resume()

    async def close(self) -> None:
        """Close every connection and wait for the end of their handlers."""
        self.stop()
        tasks = [connection._task for connection in self.connections if connection._task is not None]
        for connection in list(self.connections):
            dismiss(connection)
            connection.drop()
        await asyncio.gather(*tasks, *self._handshakes, return_exceptions=True)

    def _resume(self) -> None:
        self._retry = None
        if not self._is_closed and not self._is_handed_over:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _pause(self, retry_s: float | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        if self._retry is not None:
            self._retry.cancel()
        self._retry = loop.call_later(retry_s, self._resume) if retry_s is not None else None

    def _accept(self) -> None:
        for number in range(ACCEPTS):
            if number and self._is_full:
                return  # called again if another connection waits
            if not self._has_room():
                return
            keeper = self._keeper if self.tls is None else None
            if keeper is not None:
                keeper.prepare()
            try:
                client, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    self._say("accept", "a connection could not be accepted: %s", error)
                    return
                self._say("accept", "no connection can be accepted: %s; idle ones are closed", error)
                self._pause(0.0 if self._evict() else RETRY_S)  # a closed one is freed in the next turn
                return
            kept = None if keeper is None else keeper.keep(client)
            client.setblocking(False)
            task = asyncio.ensure_future(self._connect(client, kept))
            self._handshakes[task] = client, kept
            task.add_done_callback(self._connected)

    @property
    def _is_full(self) -> bool:
        return len(self.connections) + len(self._handshakes) >= self.limit

    def _has_room(self) -> bool:
        """Make room for a connection that waits. Returns False, and pauses, if every connection is busy."""
        if not self._is_full:
            return True
        self._say("limit", "all %d connections are in use; idle ones are closed", self.limit)
        if self._evict():
            return True
        self._pause(RETRY_S)
        return False

    def _evict(self) -> int:
        """Close the connections that have been idle longest, those without any request first. Returns their number."""
        count = max(1, self.limit // EVICTED_SHARE)
        idle = [connection for connection in self.connections if connection.is_idle]
        chosen = heapq.nsmallest(count, idle, key=lambda connection: (connection.has_served, connection.idle_since))
        for connection in chosen:
            self.connections.discard(connection)
            connection.drop()
        late = list(self._handshakes)[: count - len(chosen)] if self.tls is not None else []
        for task in late:
            task.cancel()
        return len(chosen) + len(late)

    async def adopt(self) -> None:
        """Go on with the connections of an earlier api, before new ones are accepted."""
        for client, kept in await self._keeper.take() if self._keeper is not None else ():
            try:
                await self._adopt(client, kept)
            except Exception:  # isolation boundary: one connection
                log.exception("a connection of the last process cannot go on")
                client.close()
                kept.release()

    async def _adopt(self, client: socket.socket, kept: KeptConnection) -> None:
        rest, record = kept.recording.unsent(client), kept.recording.record
        is_lost = record.request_bytes < 0 or record.adoptions > MOST_ADOPTIONS
        if rest is None or is_lost:
            why = "it is larger than its recording" if record.adoptions <= MOST_ADOPTIONS else "too many processes died"
            log.error("a request cannot go on: %s", why, extra={"facts": {"request": record.request_id}})
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.close()
            kept.release()
            return
        client.setblocking(False)
        connection = Connection(self._app, self.connections, self._state, kept)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, client)
        connection.go_on(rest)

    async def _connect(self, client: socket.socket, kept: KeptConnection | None) -> None:
        tls = self.tls
        handshake_s = HEAD_S if tls is not None else None
        try:
            if tls is not None and await speaks_http(client, HEAD_S):
                await refuse(client)
                return
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self._app, self.connections, self._state, kept),
                client,
                ssl=tls,
                ssl_handshake_timeout=handshake_s,
            )
            return
        except OSError:  # the client is gone or silent, or its handshake failed
            client.close()
        except Exception:  # isolation boundary: one connection
            client.close()
            log.exception("a connection could not be set up")
        if kept is not None:
            kept.release()

    def _connected(self, task: asyncio.Task[None]) -> None:
        client, kept = self._handshakes.pop(task)
        if task.cancelled():
            client.close()
            if kept is not None:
                kept.release()

    def _say(self, kind: str, text: str, *args: object) -> None:
        """Log a warning, at most once per `LOG_S` and kind."""
        now = self._clock()
        if now >= self._next_log.get(kind, 0.0):
            self._next_log[kind] = now + LOG_S
            log.warning(text, *args)


def open_descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
