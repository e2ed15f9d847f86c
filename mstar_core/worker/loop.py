"""The worker's loop: one thread of control per device. Routes what step N-1 brought while step N runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from mstar_core.engine.base import Counted, Handle, NodeRunner, WorksWhenIdle
from mstar_core.messages.flow import StreamItems, StreamTensor, TensorFreed, Values
from mstar_core.messages.life import PeerDown, PeerReady, PeerUp
from mstar_core.messages.names import CONDUCTOR
from mstar_core.messages.wire import Envelope, Message
from mstar_core.messages.work import CloseRequest, EndStream, OpenRequest, ReleaseSignal, RunWalks
from mstar_core.observe.child import ChildLife
from mstar_core.transport import Courier, Mailbox, Malformed, TensorTransport
from mstar_core.worker.early import EarlyMessages
from mstar_core.worker.executor import Executor
from mstar_core.worker.outbox import Outbox
from mstar_core.worker.steps import Steps

log = logging.getLogger(__name__)

TELEMETRY_S: Final = 0.1
QUIET_S: Final = 1.0
"""Without a step or a message for so long, a runner may do what can wait (capture further steps)."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """One rank. Owned by `main.py`; every field is used from its one thread.

    quiet_since: when the last step or message was; work that can wait is done after some quiet.
    """

    mailbox: Mailbox[Envelope]
    courier: Courier[Message]
    transport: TensorTransport
    life: ChildLife
    executor: Executor
    outbox: Outbox
    runners: Mapping[str, NodeRunner]
    steps: Steps
    early: EarlyMessages = field(default_factory=EarlyMessages)
    next_report: float = 0.0
    last_report: dict[str, float] = field(default_factory=dict)
    has_news: bool = False
    has_idle_work: bool = True
    quiet_since: float = 0.0
    idle_s: float = 0.0

    def run(self) -> None:
        """Turn until the supervisor asks for the end or is lost."""
        while self.life.stop_reason is None:
            self.turn()
        log.info("worker ends: %s", self.life.stop_reason)

    def turn(self) -> None:
        """One turn: messages in, steps launched, what is done routed, messages out. Waits when nothing came of it."""
        now = time.monotonic()
        self.drain()
        launched = self.steps.launch()
        collected = 0
        for result in self.steps.collect(launched):
            self.executor.take(result)
            collected += 1
        self.has_news = self.has_news or collected > 0
        self.give_back()
        self.outbox.flush()
        self.courier.flush()
        in_flight = self.steps.count
        self.life.beat(now, work_ready=bool(launched or in_flight), steps=self.steps.collected)
        self.report(now)
        if launched or collected:
            self.quiet_since = now
        elif in_flight:
            self.steps.wait(lambda: self.mailbox.wait(0.0))
        elif not self.work_in_the_quiet(now):
            self.mailbox.wait(self.wait_s(now), writable=self.courier.blocked())
            self.idle_s += time.monotonic() - now

    def work_in_the_quiet(self, now: float) -> bool:
        """One piece of a runner's work that can wait, when nothing has happened for a while; whether there was any."""
        if not self.has_idle_work or now - self.quiet_since < QUIET_S:
            return False
        self.has_idle_work = any([r.idle() for r in self.runners.values() if isinstance(r, WorksWhenIdle)])
        return True

    def wait_s(self, now: float) -> float:
        """Seconds until something is due without a message: a beat, a report of what changed, work for the quiet."""
        due = self.life.wait_s(now)
        if self.has_news:
            due = min(due, max(0.0, self.next_report - now))
        if self.has_idle_work:
            due = min(due, max(0.0, self.quiet_since + QUIET_S - now))
        return due

    def drain(self) -> None:
        """Take what came in. One bad message disturbs no other."""
        for item in self.mailbox.drain():
            if isinstance(item, Malformed):
                log.warning("a message could not be read: %s", item.error)
                continue
            if self.life.on(item.body):
                continue
            self.has_news = True
            self.quiet_since = time.monotonic()
            try:
                self.dispatch(item.body)
            except Exception:  # isolation boundary: one message
                log.exception("message %s of %s failed", type(item.body).__name__, item.sender)

    def dispatch(self, message: Message) -> None:
        """Hand one message to whom it concerns."""
        match message:
            case RunWalks():
                self.executor.run(message)
            case OpenRequest():
                self.executor.open(message)
                for early in self.early.take(message.handle):
                    self.dispatch(early)
            case CloseRequest():
                self.early.closed(message.handle)
                self.executor.close(Handle(message.handle))
            case EndStream():
                self.executor.end_stream(message)
            case StreamItems():
                self.executor.stream_items(self.early.sift(message, self.executor.requests))
            case Values():
                for item in message.items:
                    if not self.early.keep(item.handle, Values(items=[item]), self.executor.requests):
                        self.executor.value(item)
            case StreamTensor():
                if not self.early.keep(message.handle, message, self.executor.requests):
                    self.executor.stream_tensor(message)
            case TensorFreed():
                for slot, generation in message.slots:
                    self.transport.release(slot, generation)
            case PeerUp():
                self.transport.connect(message.name, message.fd_endpoint, message.incarnation)
            case PeerDown():
                self.peer_down(message)
            case ReleaseSignal():
                self.executor.release_signal(message)
            case PeerReady():
                pass  # nothing here depends on it
            case _:
                log.warning("an unexpected %s was dropped", type(message).__name__)

    def give_back(self) -> None:
        """Return the loans of tensors that came for requests which are over, and were never read."""
        for ref in self.early.abandoned:
            self.outbox.read(ref)
        self.early.abandoned.clear()

    def peer_down(self, message: PeerDown) -> None:
        """Forget a peer; without a conductor no request has an owner."""
        self.transport.reclaim(message.name, message.incarnation)
        if message.name == CONDUCTOR:
            self.executor.close_all()
            self.early.clear()

    def report(self, now: float) -> None:
        """Send what changed to the supervisor, at most ten times a second."""
        if now < self.next_report:
            return
        self.next_report = now + TELEMETRY_S
        self.has_news = False
        values = self.readings()
        changed = {name: value for name, value in values.items() if self.last_report.get(name) != value}
        if changed:
            self.last_report = values
            self.life.telemetry(changed, [], [])

    def readings(self) -> dict[str, float]:
        """Gauges and counters of this rank by name."""
        values = {
            f"{self.life.name}.requests": float(len(self.executor.requests)),
            f"{self.life.name}.steps": float(self.steps.collected),
            f"{self.life.name}.idle_s": round(self.idle_s, 3),
            f"{self.life.name}.wait_s": round(self.steps.waited_s, 3),
        }
        values[f"{self.life.name}.shm_bytes"] = float(self.transport.used_bytes)
        values[f"{self.life.name}.shm_live"] = float(self.transport.live)
        for name, runner in self.runners.items():
            memory, pressure = runner.memory(), runner.pressure()
            prefix = f"{self.life.name}.{name}"
            values |= {
                f"{prefix}.pages_total": float(memory.pages_total),
                f"{prefix}.pages_used": float(memory.pages_used),
                f"{prefix}.pages_cached": float(memory.pages_cached),
                f"{prefix}.slots_used": float(memory.slots_used),
                f"{prefix}.preempted": float(memory.preempted),
                f"{prefix}.ready": float(pressure.ready),
                f"{prefix}.waiting": float(pressure.waiting),
            }
            if isinstance(runner, Counted):
                values |= {f"{prefix}.{key}": value for key, value in runner.counters().items()}
            if self.steps.statistics[name].steps:
                values |= {f"{prefix}.{key}": value for key, value in self.steps.statistics[name].values().items()}
        return values
