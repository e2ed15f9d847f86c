"""The api process: inherits its port, joins the deployment and serves until stopped. Started by the supervisor."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import selectors
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from sanic import Sanic

from mstar_core.api.api_metrics import Metrics
from mstar_core.api.app import make_app
from mstar_core.api.handover.keeper import Keeper
from mstar_core.api.http.listener import (
    Listener,
    allowed_connections,
    open_descriptors,
)
from mstar_core.api.http.sanic_protocol import start_app
from mstar_core.api.link import Link
from mstar_core.api.parse.media import Fetcher
from mstar_core.api.preprocess.child import load_processor
from mstar_core.api.preprocess.grammar_checks import GrammarChecks
from mstar_core.api.preprocess.pool import Pool
from mstar_core.api.preprocess.process import MakeProcess, ProcessorProcess
from mstar_core.api.requests.registry import Registry
from mstar_core.api.service import KEEPALIVE_S, Service
from mstar_core.config.deployment import DeploymentSpec
from mstar_core.config.live import take_live
from mstar_core.config.resolved import ApiConfig
from mstar_core.constraints.vocabulary import TokenTable
from mstar_core.errors import PluginError, Unavailable
from mstar_core.host.ports import bind_port
from mstar_core.host.run_dir import RunDirectory
from mstar_core.host.tls.certificates import load_certificate
from mstar_core.host.wait_spin import wait_spin_s
from mstar_core.plugin.loader import bound_model
from mstar_core.plugin.processor import ConstrainableProcessor, Detokenizer, WarmedProcessor
from mstar_core.plugin.spec import ModelSpec
from mstar_core.process.failures import guarded_run
from mstar_core.process.life import start_child
from mstar_core.process.logs import hide_secrets
from mstar_core.process.system import keep_freed_memory, keep_start, raise_descriptor_limit
from mstar_core.transport import Spin
from mstar_core.transport.fd_store import FdStoreClient
from mstar_core.transport.spin import spin_then_block

OPEN_S: Final = 5.0
"""Longest wait of a restarted api for the rest of the deployment, before it answers by itself."""

CLOSE_S: Final = 5.0
"""Grace period for responses in progress when the process stops."""

SWITCH_S: Final = 0.001
"""Longest wait of a thread for the interpreter while the loop is busy; Python's own 5 ms delay large prompts."""

DECODED: Final = ("image", "audio", "video")
"""Modalities whose files are decoded in the pool."""

log = logging.getLogger("mstar.api")


class ApiProcess:
    """Resources of the process. `start` creates them in order; `close` frees them in reverse order."""

    def __init__(
        self,
        spec: DeploymentSpec,
        incarnation: int,
        supervisor: str,
        model: ModelSpec,
        *,
        keepalive_s: float = KEEPALIVE_S,
        fetcher: Fetcher | None = None,
        make_process: MakeProcess = ProcessorProcess,
        spin: Spin | None = None,
        sock: socket.socket | None = None,
        store: socket.socket | None = None,
    ) -> None:
        """Open the mailbox before anything is loaded. Raises StartError, TransportError.

        spin: busy-poll window of the event loop; requests restart it. sock: the bound socket of the supervisor. An api
        without one, in tests, binds the port itself. store: the socket by which the supervisor keeps connections.
        """
        if model.processor is None:
            raise PluginError(
                f"{model.name} cannot be served by the installed version", hint="its plugin has no model code"
            )
        self.spec = spec
        self.model = model
        self._tls = tls_context(spec.api)
        self.socket = sock if sock is not None else bind_port(spec.api.host, spec.api.port)
        self._keeper = Keeper(FdStoreClient(store, incarnation)) if store is not None else None
        self._is_restarted = incarnation > 1
        self.registry = Registry(incarnation)
        self.metrics = Metrics()
        self._folder = Path(spec.folder) if spec.folder is not None else None
        try:
            self.link = Link(spec, incarnation, supervisor, self.registry, self.metrics, spin=spin)
        except BaseException:
            self.socket.close()
            raise
        self.life = self.link.life
        self.pool = Pool(
            model.processor,
            self._folder,
            spec.model_kwargs,
            size=spec.api.pool_processes,
            media=[modality.kind for modality in model.inputs if modality.kind in DECODED],
            make=make_process,
        )
        self.stopped: asyncio.Future[str] | None = None
        self._keepalive_s = keepalive_s
        self._make_process = make_process
        self._fetcher = fetcher or Fetcher(spec.api.remote_media, spec.api.max_body_bytes)
        self._app: Sanic[Any, Any] | None = None
        self._service: Service | None = None
        self._token_table: Callable[[], TokenTable] | None = None
        self._text_processor: Any = None
        self._listener: Listener | None = None

    @property
    def is_serving(self) -> bool:
        """Return whether connections are accepted."""
        return self._listener is not None

    @property
    def port(self) -> int:
        """Return the bound port."""
        return int(self.socket.getsockname()[1])

    async def start(self) -> None:
        """Join the deployment, start the pool and serve. Raises errors of the processor."""
        keep_freed_memory()
        loop = asyncio.get_running_loop()
        self.stopped = loop.create_future()
        self.link.on_stop = self.stop
        self.link.on_reload = self._reload
        self.link.unserved = lambda: 0 if self._listener is None else self._listener.hand_over()
        self.link.take_back = lambda: None if self._listener is None else self._listener.take_back()
        self.link.attach(loop)
        self.life.phase("pool", total=self.spec.api.pool_processes or 1)
        app = self._make_app(await self._detokenizer())
        if not (self.spec.api.bind_when_ready or self._is_restarted):
            await self._serve(app)
        await asyncio.gather(self.pool.start(), asyncio.to_thread(self._warm_text))
        if self._is_restarted:  # connections wait: those that were kept, and those in the backlog
            await self.link.wait_open(OPEN_S)
            await self._serve(app)
        elif self.spec.api.bind_when_ready:
            self.link.on_ready = lambda: self._spawn_serve(app)
            if self.link.deployment.problem() is None:
                self.link.on_ready = None
                await self._serve(app)
        self.life.phase("ready", facts={"port": self.port, "host": self.spec.api.host})

    def stop(self, reason: str) -> None:
        """Request the end of the process."""
        if self.stopped is not None and not self.stopped.done():
            self.stopped.set_result(reason)

    async def close(self) -> None:
        """Refuse new requests, fail running ones, close sockets and free everything. Also used after a failed start."""
        self.link.deployment.is_closing = True
        for live in self.registry:
            live.fail(Unavailable("the deployment is stopping", hint="retry later", code="draining"))
        await self.registry.wait_empty(CLOSE_S)
        if self._service is not None:
            await self._service.close()
        if self._listener is not None:
            await self._listener.close()
        if self._app is not None:
            Sanic.unregister_app(self._app)
        self.socket.close()
        if self._keeper is not None:
            self._keeper.close()
        await self.pool.close()
        self.link.close()

    def _reload(self) -> None:
        """Take keys, certificate, limits and LoRA adapters from the spec, which the supervisor has checked and written.

        Raises StartError, and keeps all of them, if the certificate has become unusable since that check.
        """
        newer = DeploymentSpec.load(RunDirectory(Path(self.spec.run_dir)).spec)
        api, spec = newer.api, take_live(self.spec, newer)
        hide_secrets(api.secrets)
        kept = msgspec.structs.replace(
            spec.api, api_keys=api.api_keys, metrics_keys=api.metrics_keys, ice_secrets=api.ice_secrets
        )
        self._tls = tls_context(kept)
        self.spec = msgspec.structs.replace(spec, api=kept, adapters=newer.adapters)
        if self._listener is not None:
            self._listener.tls = self._tls  # open connections keep theirs
        if self._service is not None:
            self._service.reconfigure(self.spec)
        log.info("keys, certificate and limits reloaded", extra={"facts": {"keys": len(api.api_keys)}})

    def _make_app(self, detokenizer: Callable[[], Detokenizer] | None) -> Sanic[Any, Any]:
        self._service = service = Service(
            self.spec,
            self.model,
            self.link,
            self.pool,
            self.registry,
            self.metrics,
            fetcher=self._fetcher,
            detokenizer=detokenizer,
            token_table=self._token_table,
            grammars=GrammarChecks(make=self._make_process),
            keepalive_s=self._keepalive_s,
        )
        self._app = make_app(service)
        return self._app

    async def _detokenizer(self) -> Callable[[], Detokenizer] | None:
        # Detokenization runs in this process, so models with text output load their processor here as well.
        if self.model.output("text") is None or self.model.processor is None:
            return None
        processor: Any = await asyncio.to_thread(
            load_processor, self.model.processor, self._folder, self.spec.model_kwargs
        )
        if isinstance(processor, ConstrainableProcessor):
            self._token_table = functools.cache(processor.token_table)
        self._text_processor = processor
        make: Callable[[], Detokenizer] = processor.detokenizer
        return make

    def _warm_text(self) -> None:
        """Load what the first text would load on the event loop, such as a tokenizer of 150,000 ids."""
        if not isinstance(self._text_processor, WarmedProcessor):
            return
        try:
            self._text_processor.warm_up()
        except Exception:  # isolation boundary: a plugin's code; each request reports the problem
            log.exception("the processor could not be warmed up in the api")

    def _spawn_serve(self, app: Sanic[Any, Any]) -> None:
        task = asyncio.ensure_future(self._serve(app))
        task.add_done_callback(lambda done: self.stop("the port cannot be served") if done.exception() else None)

    async def _serve(self, app: Sanic[Any, Any]) -> None:
        await start_app(app)
        limit = allowed_connections(self.spec.api.max_connections, raise_descriptor_limit(), open_descriptors())
        listener = Listener(app, self.socket, limit, self._tls, keeper=self._keeper)
        await listener.adopt()
        listener.start()
        self._listener = listener
        if self._service is not None:
            await self._service.videos.resume()
        log.info("serving", extra={"facts": {"host": self.spec.api.host, "port": self.port}})


async def serve(process: ApiProcess) -> str:
    """Run until stopped. Returns the reason."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stop, signal.Signals(number).name)
    try:
        await process.start()
        keep_start()
        assert process.stopped is not None
        return await process.stopped
    finally:
        await process.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m mstar_core.api SPEC --incarnation N --supervisor ENDPOINT [--listener FD --store FD]`."""
    parser = argparse.ArgumentParser(add_help=False)
    for name in ("--listener", "--store"):
        parser.add_argument(name, type=inherited, metavar="FD")
    own, rest = parser.parse_known_args(argv)
    _, spec, incarnation, supervisor, *_ = start_child("api", rest)
    return run(spec, incarnation, supervisor, own.listener, own.store)


def inherited(number: str) -> socket.socket:
    """Return the socket that this process has inherited under a descriptor."""
    return socket.socket(fileno=int(number))


def run(
    spec: DeploymentSpec,
    incarnation: int,
    supervisor: str,
    sock: socket.socket | None = None,
    store: socket.socket | None = None,
) -> int:
    """Serve a deployment until it stops. Errors are written to the run directory before the process ends.

    sock, store: see `ApiProcess`.
    """
    with guarded_run("api", incarnation, Path(spec.run_dir)):
        sys.setswitchinterval(SWITCH_S)
        spin = Spin(wait_spin_s(spec))
        model = bound_model(spec.plugin, spec.model, spec.folder, spec.model_kwargs)
        process = ApiProcess(
            spec.fitted(model),
            incarnation,
            supervisor,
            model,
            spin=spin,
            sock=sock,
            store=store,
        )
        with asyncio.Runner(loop_factory=partial(busy_poll_loop, spin)) as runner:
            reason = runner.run(serve(process))
        log.info("stopped: %s", reason)
    return 0


class BusyPollSelector(selectors.EpollSelector):
    """Polls the kernel without blocking until the spin window expires, then blocks."""

    def __init__(self, spin: Spin) -> None:
        super().__init__()
        self._spin = spin

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return ready descriptors. timeout: seconds until the next timer of the loop; None: there is none."""
        left_s = self._spin.left_s
        if not left_s or (timeout is not None and timeout <= 0):
            return super().select(timeout)
        return spin_then_block(super().select, timeout, left_s, self._spin.clock)


def busy_poll_loop(spin: Spin) -> asyncio.AbstractEventLoop:
    """Return a new event loop that busy-polls until the spin window expires."""
    return asyncio.SelectorEventLoop(BusyPollSelector(spin))


def tls_context(api: ApiConfig) -> ssl.SSLContext | None:
    """Return the TLS context; None for plain HTTP. Raises StartError."""
    return load_certificate(api.tls_cert, api.tls_key)
