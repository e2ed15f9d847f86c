"""Worker of a gateway: the event loop with door, fleet, gate and admin socket. Started by the keeper."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvloop
from aiohttp import web

from mstar_core.errors import ConfigError, MstarError
from mstar_core.gateway.assembly import make_fleet, make_gate
from mstar_core.gateway.door.affinity import Affinity
from mstar_core.gateway.door.door import Door
from mstar_core.gateway.door.kept_ids import KeptIds
from mstar_core.gateway.fleet.local_host import command_error
from mstar_core.gateway.parts import Fleet, Gate
from mstar_core.gateway.process.admin import AdminRoutes
from mstar_core.gateway.process.keeper import HANDOVER, READY, spec_file
from mstar_core.gateway.process.spec import GatewaySpec
from mstar_core.gateway.process.tls_site import TlsSite
from mstar_core.gateway.serve_file import ServeFile, load_serve_file
from mstar_core.gateway.tenants.accounts.folder import gateway_folder
from mstar_core.host.private_files import write_private
from mstar_core.process.logs import start_logging
from mstar_core.process.system import end_imports, keep_start

KEEP_ALIVE_S: Final = 75.0
SILENT_S: Final = 30.0
"""Time in which the first request of a connection must arrive."""

BACKLOG: Final = 1024

log = logging.getLogger("mstar.gateway")


def main(argv: list[str] | None = None) -> None:
    """Serve until the keeper's signal: SIGTERM ends the gateway, SIGUSR2 leaves its sockets to the next worker."""
    run_dir, *fds = (sys.argv if argv is None else argv)[1:]
    end_imports()
    spec = GatewaySpec.load(spec_file(run_dir))
    start_logging("gateway", spec.log_level)
    listener, admin = (socket.socket(fileno=int(fd)) for fd in fds[:2])
    listener.setblocking(False)
    uvloop.run(GatewayWorker(spec, int(fds[2])).run(listener, admin))


class CountedServer(web.Server):  # type: ignore[misc]  # aiohttp is not followed
    """A server that closes connections on which no request arrives. silent: those, with the time they began."""

    def __init__(self, handler: Any, **options: Any) -> None:
        super().__init__(handler, **options)
        self.silent: dict[Any, float] = {}

    def __call__(self) -> Any:
        """Return the protocol of a new connection."""
        protocol = super().__call__()
        self.silent[protocol] = time.monotonic()
        return protocol

    async def sweep(self) -> None:
        """Close connections that are silent for too long, until cancelled."""
        while True:
            await asyncio.sleep(SILENT_S / 2)
            self.close_silent(time.monotonic() - SILENT_S)

    def close_silent(self, before: float) -> None:
        """Close connections that began before a moment without a request since."""
        for protocol in [each for each, begun in self.silent.items() if begun <= before]:
            del self.silent[protocol]
            protocol.force_close()


@dataclass(slots=True)
class GatewayWorker:
    """One worker. ready: descriptor on which it reports once that it serves.

    is_final: it ends because the gateway ends. grace_s: time limit of the drain.
    """

    spec: GatewaySpec
    ready: int
    grace_s: float = field(init=False)
    started: float = field(default_factory=time.monotonic)
    is_final: bool = False
    reason: str = ""
    door: Door = field(init=False)
    fleet: Fleet = field(init=False)
    gate: Gate = field(init=False)
    tls: ssl.SSLContext | None = None
    _connections: CountedServer | None = None
    _end: asyncio.Event = field(default_factory=asyncio.Event)
    _reloads: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, listener: socket.socket, admin: socket.socket) -> None:
        """Serve on both sockets until a signal, then drain."""
        serve = self.spec.serve
        self.grace_s = serve.drain_timeout_s
        state_dir = Path(self.spec.state_dir)
        self.fleet, self.gate = make_fleet(serve, state_dir), make_gate(serve, state_dir)
        kept = await asyncio.to_thread(KeptIds.opened, gateway_folder())
        self.door = Door(self.fleet, self.gate, serve, affinity=Affinity(kept))
        self.tls = tls_context(serve)
        await self.gate.start()
        await self.fleet.start()
        await self.door.start()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop, True)
        loop.add_signal_handler(HANDOVER, self.stop, False)
        loop.add_signal_handler(signal.SIGHUP, self._reload_for_signal)
        server = self._connections = CountedServer(
            self._limited,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            keepalive_timeout=KEEP_ALIVE_S,
        )
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        site: web.BaseSite = (
            web.SockSite(runner, listener, backlog=BACKLOG)
            if self.tls is None
            else TlsSite(runner, listener, self.tls, backlog=BACKLOG)
        )
        admin_runner = web.AppRunner(AdminRoutes(self).app(), access_log=None, shutdown_timeout=1.0)
        await admin_runner.setup()
        admin_site = web.SockSite(admin_runner, admin)
        await site.start()
        await admin_site.start()
        keep_start()
        os.write(self.ready, READY)
        os.close(self.ready)
        log.info("the gateway serves on %s", self.spec.url)
        sweeper = asyncio.create_task(server.sweep(), name="silent connections")
        await self._end.wait()
        sweeper.cancel()
        # The keeper holds the sockets: connections that arrive from now on wait for the next worker.
        await site.stop()
        if not self.is_final:
            await admin_site.stop()
        await self._drain()
        await runner.cleanup()
        await admin_runner.cleanup()
        await self.door.close()
        await self.gate.close()  # reads the last reports, so before the deployments end
        await self.fleet.close(is_final=self.is_final)
        gc.unfreeze()

    async def _limited(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, or refuse it beyond the limit of connections."""
        assert self._connections is not None
        self._connections.silent.pop(request.protocol, None)
        if len(self._connections.connections) > self.door.serve.max_connections:
            body = b'{"error":{"message":"the gateway has too many connections","type":"server_error","param":null,'
            headers = {"Content-Type": "application/json", "Retry-After": "1", "Connection": "close"}
            return web.Response(body=body + b'"code":"too_many_connections"}}', status=503, headers=headers)
        return await self.door.handle(request)

    async def _drain(self) -> None:
        self.door.is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self.grace_s):
                await self.door.idle.wait()

    def stop(self, is_final: bool) -> None:
        """Stop to accept connections, and end when the requests in flight have ended."""
        self.is_final = self.is_final or is_final
        self.reason = "stopping" if self.is_final else "a new worker has taken over"
        self._end.set()

    @property
    def is_stopping(self) -> bool:
        """Whether it has stopped to accept connections."""
        return self._end.is_set()

    async def reload(self) -> None:
        """Read serve.yaml and the certificate again. Raises ConfigError, and then nothing has changed."""
        path = self.spec.serve.path
        serve = self.spec.serve if path is None else await asyncio.to_thread(load_serve_file, Path(path))
        if self.tls is not None and serve.tls_cert is not None:
            load_certificate(self.tls, serve)
        await self.take(serve)

    async def take(self, serve: ServeFile) -> None:
        """Take over a changed configuration, and keep it for the next worker. Raises ConfigError for a fixed key."""
        now = self.spec.serve
        for key in ("host", "port"):
            if getattr(serve, key) != getattr(now, key):
                hint = f"start the gateway again: mstarctl serve down {self.spec.name}"
                raise ConfigError(f"{key} cannot change while the gateway runs", hint=hint, key=key, file=serve.path)
        await self.gate.apply(serve)
        await self.fleet.apply(serve)
        self.door.take(serve)
        self.spec = GatewaySpec(
            **{name: getattr(self.spec, name) for name in self.spec.__struct_fields__ if name != "serve"}, serve=serve
        )
        await asyncio.to_thread(write_private, spec_file(self.spec.run_dir), self.spec.encode())

    def _reload_for_signal(self) -> None:
        task = asyncio.create_task(self._reload_logged())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload_logged(self) -> None:
        """Reload as `mstarctl serve reload` does, which plans the models first."""
        try:
            if self.spec.serve.path is not None:
                await check_command(self.spec.serve.path)
            await self.reload()
        except MstarError as error:
            log.error("the configuration was not reloaded: %s", error)


async def check_command(path: str) -> None:
    """Let `mstarctl` check a serve.yaml. Raises StartError for a model that can never start."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mstarctl", "serve", "up", path, "--dry-run"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    if process.returncode:
        raise command_error(said.decode("utf-8", "replace"), f"{path} cannot be served")


def tls_context(serve: ServeFile) -> ssl.SSLContext | None:
    """Return the TLS settings of the port, None without a certificate. Raises ConfigError."""
    if serve.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(context, serve)
    return context


def load_certificate(context: ssl.SSLContext, serve: ServeFile) -> None:
    """Read certificate and key. Raises ConfigError."""
    try:
        # Without a password, OpenSSL would prompt on the terminal for the one of an encrypted key.
        context.load_cert_chain(serve.tls_cert or "", serve.tls_key, password="")
    except (OSError, ssl.SSLError) as error:
        hint = "tls_cert and tls_key must be PEM files that belong together, and the key must not be encrypted"
        raise ConfigError(
            "the certificate cannot be used", str(error), hint, file=serve.path, key="tls_cert"
        ) from error
