"""Process of the conductor: one mailbox and one thread that only waits for events."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from mstar_core.conductor.conductor import Conductor
from mstar_core.config.deployment import DeploymentSpec
from mstar_core.config.graph_view import graph_of
from mstar_core.host.run_dir import RunDirectory
from mstar_core.host.wait_spin import wait_spin_s
from mstar_core.messages.requests import Reconcile
from mstar_core.messages.wire import Envelope
from mstar_core.observe.frames import GRAPH_FACT
from mstar_core.plugin.loader import bound_model
from mstar_core.process.life import ChildLife, start_child
from mstar_core.process.sockets import ChildSockets
from mstar_core.process.system import keep_start
from mstar_core.transport import Mailbox, Spin
from mstar_core.transport.courier import REQUEST_BYTES

log = logging.getLogger(__name__)

NAME = "conductor"
EXPIRE_S = 1.0
TELEMETRY_S = 0.1


class ConductorLoop:
    """Main loop of the process. Owns the mailbox and the conductor."""

    def __init__(self, conductor: Conductor, mailbox: Mailbox, life: ChildLife, spin: Spin, reconcile_s: float) -> None:
        self._conductor = conductor
        self._mailbox = mailbox
        self._life = life
        self._spin = spin
        self._reconcile_s = reconcile_s
        self._next_expire = 0.0
        self._next_reconcile = 0.0
        self._next_report = 0.0
        self._last_report: dict[str, float] = {}
        self._has_news = False

    def run(self) -> None:
        """Run until the supervisor requests the end or is lost."""
        while self._life.stop_reason is None:
            now = time.monotonic()
            self._life.beat(now, steps=self._conductor.finished)
            self._timers(now)
            self._mailbox.wait(self._wait_s(now), spin_s=self._spin.left_s)
            for item in self._mailbox.drain():
                if not isinstance(item, Envelope):
                    log.warning("a message could not be read: %s", item.error)
                elif self._life.accepts(item):
                    for message in self._life.receive(item):
                        self._has_news = True
                        if not isinstance(message, Reconcile):  # comes without any request, too
                            self._spin.rouse()
                        self._conductor.on(message)
        log.info("conductor ends: %s", self._life.stop_reason)

    def _wait_s(self, now: float) -> float:
        due = self._life.wait_s(now)
        return min(due, max(0.0, self._next_report - now)) if self._has_news else due

    def _timers(self, now: float) -> None:
        if now >= self._next_expire:
            self._next_expire = now + EXPIRE_S
            self._conductor.expire()
        if now >= self._next_reconcile:
            self._next_reconcile = now + self._reconcile_s
            self._conductor.reconcile()
        if now >= self._next_report:
            self._next_report = now + TELEMETRY_S
            self._has_news = False
            self._report()

    def _report(self) -> None:
        conductor = self._conductor
        values: dict[str, float] = {
            "in_flight": len(conductor.requests) + len(conductor.waiting),
            "finished": conductor.finished,
            "failed": conductor.failed,
            "unknown_messages": conductor.unknown,
            "leftovers": conductor.leftovers.closed,
            **{f"load.{rank}": load for rank, load in conductor.router.load.items()},
        }
        news = conductor.progress.take(conductor.requests)
        if news or values != self._last_report:
            self._last_report = values
            self._life.telemetry(values, news)


def main(argv: list[str] | None = None) -> None:
    """Entry point: `python -m mstar_core.conductor SPEC --incarnation N --supervisor ENDPOINT`."""
    arguments = start_child(NAME, argv)
    spec = arguments.spec
    with ChildSockets(arguments, message_bytes=REQUEST_BYTES) as sockets:
        life = sockets.life
        with life.guarded():
            model = bound_model(spec.plugin, spec.model, spec.folder, spec.model_kwargs)
            spec = spec.fitted(model)
            mailbox = sockets.open_mailbox()
            conductor = Conductor(
                model,
                spec.plan,
                sockets.courier,
                max_seq_len=spec.max_seq_len,
                clock=time.monotonic,
                has_prefix_caches=spec.kv_cache.prefix_cache,
                read_plan=lambda: DeploymentSpec.load(RunDirectory(Path(spec.run_dir)).spec).plan,
            )
            keep_start()
            life.phase("ready", facts={GRAPH_FACT: msgspec.to_builtins(graph_of(model, spec.plan))})
            spin = Spin(wait_spin_s(spec))
            log.info("processes of this deployment spin for %g ms before they sleep", 1000 * spin.span_s)
            ConductorLoop(conductor, mailbox, life, spin, spec.reconcile_s).run()
