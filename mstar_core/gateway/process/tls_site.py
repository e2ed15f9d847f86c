"""Site of the gateway's port with a certificate: TLS connections to aiohttp's server, 400 for plain HTTP.

aiohttp's own site gives a connection to TLS at once, which closes one of plain HTTP without an answer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Any, Final

from aiohttp import web

from mstar_core.host.tls.plain_http import refuse, speaks_http

ACCEPTS: Final = 64
"""Connections accepted per turn of the event loop."""

HANDSHAKE_S: Final = 30.0
"""Time limit of the first byte, and of the handshake after it."""

RETRY_S: Final = 1.0
"""Pause after a connection that could not be accepted, for lack of descriptors."""

log = logging.getLogger("mstar.gateway")


class TlsSite(web.BaseSite):  # type: ignore[misc]  # aiohttp is not followed
    """A listening socket and its handshakes. Owned by the worker. backlog: connections that wait in the kernel."""

    def __init__(self, runner: web.ServerRunner, listener: socket.socket, tls: ssl.SSLContext, *, backlog: int) -> None:
        super().__init__(runner, ssl_context=tls, backlog=backlog)
        self._listener = listener
        self._tls = tls
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}
        self._retry: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """Return the address of the socket."""
        host, port = self._listener.getsockname()[:2]
        return f"https://{host}:{port}"

    async def start(self) -> None:
        """Accept connections."""
        await super().start()
        self._listener.listen(self._backlog)
        self._resume()

    async def stop(self) -> None:
        """Close the listening socket, of which the keeper has a copy, and drop unfinished handshakes."""
        self._pause()
        self._listener.close()
        for task in list(self._handshakes):
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        await super().stop()

    def _resume(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("no connection can be accepted: %s", error)
                self._pause()
                self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._resume)
                return
            client.setblocking(False)
            task = asyncio.ensure_future(self._connect(client))
            self._handshakes[task] = client
            task.add_done_callback(self._connected)

    async def _connect(self, client: socket.socket) -> None:
        server: Any = self._runner.server
        try:
            if await speaks_http(client, HANDSHAKE_S):
                await refuse(client)
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(server, client, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S)
        except OSError:  # the client is gone or silent, or its handshake failed
            client.close()

    def _connected(self, task: asyncio.Task[None]) -> None:
        client = self._handshakes.pop(task)
        if task.cancelled():
            client.close()
        elif (error := task.exception()) is not None:
            client.close()
            log.error("a connection could not be set up", exc_info=error)
