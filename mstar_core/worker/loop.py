"""Main loop of a worker: one thread per device. Routes the results of step N-1 while step N runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from mstar_core.engine.base import Handle
from mstar_core.engine.cuda_graphs.kernel_log import KernelLog
from mstar_core.engine.late_warmup import LateWarmup
from mstar_core.engine.runner import NodeRunner
from mstar_core.engine.slack import Slack, no_listener
from mstar_core.errors import TransportError, Unavailable
from mstar_core.messages.adapters import LoadAdapter, UnloadAdapter
from mstar_core.messages.flow import CacheMoved, Playing, StreamItems, StreamTensor, TensorFreed, Values
from mstar_core.messages.life import PeerDown, PeerReady, PeerUp
from mstar_core.messages.names import CONDUCTOR
from mstar_core.messages.requests import EndSession, Reconcile
from mstar_core.messages.sleep import Sleep, Wake
from mstar_core.messages.wire import Message
from mstar_core.messages.work import CloseRequest, EndStream, OpenRequest, ReleaseSignal, RunWalks
from mstar_core.process.leftovers import Leftovers
from mstar_core.process.life import ChildLife
from mstar_core.transport import Mailbox, Malformed, Spin
from mstar_core.transport.shm import TensorTransport
from mstar_core.worker.adapters import POLL_S
from mstar_core.worker.early_messages import EarlyMessages
from mstar_core.worker.executor import Executor
from mstar_core.worker.incoming.arrivals import Arrivals, handles_of, refs_of
from mstar_core.worker.incoming.reads import TensorReads
from mstar_core.worker.outbox import Outbox
from mstar_core.worker.peer_memory.transport import PeerMemory
from mstar_core.worker.report import Report
from mstar_core.worker.state.sleep import POLL_S as SLEEP_POLL_S
from mstar_core.worker.state.sleep import RankSleep
from mstar_core.worker.steps import Steps

log = logging.getLogger(__name__)

QUIET_S: Final = 1.0
"""Time without a step or a message after which runners do deferred work (CUDA graph capture)."""

FIRST_REQUEST_S: Final = 2.0
"""Further quiet time after the start: who waited for ready sends a first request now, and would wait for a capture."""

COPY_NAP_S: Final = 50e-6
"""Interval at which an idle worker checks copies from the GPU."""

HOLD_NAP_S: Final = 2e-3
"""Interval at which an idle worker checks whether held work may run now."""

COMPILE_NAP_S: Final = 1e-3
"""Interval at which an idle worker checks grammars that threads compile."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """One rank. Owned by `main.py` and used from its thread.

    quiet_since: time of the last step or message. has_idle_work: whether runners may have deferred work. kernels: those
    that the start compiled, and from then on those that a request or a capture waits for. shown: see Report.
    late: captures and warm-up while it serves. sleep: nodes that sleep. wakes_on_request: whether requests wake
    them; otherwise they fail. yields_to_sound: whether encoders and new prompts do. slack: what they may take.
    first_sound_requests: open requests up to which a first sound goes before further steps, see `FirstSounds`.
    incoming: reads of tensors that are not in the host's shared memory, None if there are none.
    """

    mailbox: Mailbox
    transport: TensorTransport
    life: ChildLife
    executor: Executor
    outbox: Outbox
    runners: Mapping[str, NodeRunner]
    steps: Steps
    peer_memory: PeerMemory | None = None
    incoming: TensorReads | None = None
    kernels: KernelLog = field(default_factory=KernelLog)
    shown: Mapping[str, str] = field(default_factory=dict)
    late: LateWarmup | None = None
    sleep: RankSleep = field(default_factory=RankSleep)
    wakes_on_request: bool = True
    early: EarlyMessages = field(default_factory=EarlyMessages)
    leftovers: Leftovers = field(default_factory=Leftovers)
    spin: Spin = field(default_factory=Spin)
    has_idle_work: bool = True
    quiet_since: float = 0.0
    yields_to_sound: bool = True
    first_sound_requests: int = 12
    slack: Slack = field(init=False)
    report: Report = field(init=False)
    _idle_round: list[NodeRunner] = field(default_factory=list)
    _has_idle_rest: bool = False
    arrivals: Arrivals | None = field(init=False)

    def __post_init__(self) -> None:
        self.arrivals = (
            None if self.incoming is None else Arrivals(self.incoming, lambda: self.executor.importing_bytes)
        )
        self.slack = Slack(self.executor.playback.least_s if self.yields_to_sound else no_listener)
        for runner in self.runners.values():
            runner.yield_to(self.slack)
        if self.first_sound_requests:
            first = self.steps.order = self.executor.first
            first.slack, first.most_requests = self.slack, self.first_sound_requests
            self.slack.is_first_due = first.is_due
        if self.late is not None:
            self.late.slack = self.slack
            self.late.open_requests = self.executor.requests.__len__
        self.report = Report(
            life=self.life,
            executor=self.executor,
            transport=self.transport,
            runners=self.runners,
            steps=self.steps,
            kernels=self.kernels,
            leftovers=self.leftovers,
            peer_memory=self.peer_memory,
            shown=self.shown,
            placed_bytes=lambda: self.sleep.placed_bytes,
        )

    def run(self) -> None:
        """Run until the supervisor requests the end or is lost."""
        self.quiet_since = time.monotonic() + FIRST_REQUEST_S
        while self.life.stop_reason is None:
            self.turn()
        self.executor.adapters.close()
        self.sleep.close()
        log.info("worker ends: %s", self.life.stop_reason)

    def turn(self) -> None:
        """Receive messages, launch steps, route finished steps, send messages; wait if there was nothing to do."""
        now = time.monotonic()
        came = self.drain()
        if self.arrivals is not None and self.arrivals.is_waiting:
            came += self.take_arrivals(self.arrivals)
        adapters = self.executor.adapters
        if adapters.is_reading:
            came += adapters.finish(self.life.answer)
        if self.executor.inputs.waiting:
            came += self.executor.begin_with_inputs()
        came += self.executor.hand_over_early()
        if self.sleep.is_working:
            came += self.sleep.turn()
        if came and self.sleep.asleep:
            self.wake_wanted()
        self.slack.is_holding = False
        is_held = self.late is not None and not self.sleep.is_active and self.late.is_due()
        launched = [] if is_held else self.steps.launch()
        collected = 0
        for result in self.steps.collect(launched):
            self.executor.take(result)
            collected += 1
        self.report.has_news = self.report.has_news or collected > 0
        self.give_back()
        self.outbox.flush()
        in_flight = self.steps.count
        # A step may have taken seconds: the heartbeat that reports it must not wait for the next one.
        is_at_work = bool(launched or in_flight) or self.steps.is_deadlocked
        self.life.beat(time.monotonic(), work_ready=is_at_work, steps=self.steps.collected)
        self.report.send(now, is_busy=bool(came or launched or collected))
        if launched or collected:
            self.quiet_since = now
            self.has_idle_work = True  # a pass of a new kind queues its capture
            self._idle_round.clear()
            self.spin.rouse()
        elif in_flight:
            self.steps.wait(lambda: self.outbox.can_send or self.has_arrived or self.mailbox.wait(0.0))
        elif self.late is not None and is_held:
            self.late.work()
        elif self.outbox.is_waiting or (self.incoming is not None and self.incoming.must_poll):
            time.sleep(COPY_NAP_S)
        elif any([runner.is_compiling for runner in self.runners.values()]):
            time.sleep(COMPILE_NAP_S)
        elif not self.work_in_the_quiet(now):
            self.mailbox.wait(self.wait_s(now), spin_s=self.spin.left_s)
            self.report.idle_s += time.monotonic() - now

    def work_in_the_quiet(self, now: float) -> bool:
        """Let runners do a piece of deferred work after a quiet time. Returns whether it was time for that."""
        if not self.has_idle_work or self.sleep.is_active or now - self.quiet_since < QUIET_S:
            return False
        if self.late is not None and self.late.work_in_the_quiet(has_requests=bool(self.executor.requests)):
            return True
        self.has_idle_work = self.do_idle_piece()
        return True

    def do_idle_piece(self) -> bool:
        """Let the next runner do a piece of deferred work. Returns whether any may have more.

        One runner per turn: a request that comes meanwhile waits for one capture, not for one of each node.
        """
        if not self._idle_round:
            self._idle_round, self._has_idle_rest = list(self.runners.values()), False
        if not self._idle_round:  # a rank of a group that only follows has no runners
            return False
        self._has_idle_rest |= self._idle_round.pop(0).idle()
        return bool(self._idle_round) or self._has_idle_rest

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next heartbeat, report or deferred work is due."""
        due = self.life.wait_s(now)
        if self.report.has_news:
            due = min(due, max(0.0, self.report.due - now))
        if self.has_idle_work and not self.sleep.is_active:
            due = min(due, max(0.0, self.quiet_since + QUIET_S - now))
        if self.executor.adapters.is_reading:
            due = min(due, POLL_S)
        if self.sleep.is_working:
            due = min(due, SLEEP_POLL_S)
        if self.late is not None and not self.sleep.is_active:
            due = min(due, self.late.wait_s())
        if self.outbox.journal.is_waiting:
            due = min(due, self.outbox.journal.wait_s)
        due = min(due, self.executor.early_in_s())
        if self.slack.is_holding:
            due = min(due, HOLD_NAP_S)
        return due

    def drain(self) -> int:
        """Handle all received messages and return their number. A bad message affects no other."""
        items = self.mailbox.drain()
        for item in items:
            if isinstance(item, Malformed):
                log.warning("a message could not be read: %s", item.error)
                continue
            if not self.life.accepts(item):
                self.forget(item.body)
                continue
            for message in self.life.receive(item):
                self.report.has_news = True
                if not isinstance(message, Reconcile):  # comes without any request, too
                    self.quiet_since = time.monotonic()
                    self.spin.rouse()
                self.handle(item.sender, message)
        return len(items)

    def forget(self, message: Message) -> None:
        """Drop a message of a process that has ended, and what others have sent or will send for its request."""
        if isinstance(message, RunWalks | OpenRequest) and Handle(message.handle) not in self.executor.requests:
            self.early.closed(message.handle)

    def handle(self, sender: str, message: Message) -> None:
        """Handle one message, or let it wait for its tensors. An error affects its requests only."""
        try:
            if self.arrivals is not None and self.arrivals.hold(sender, message):
                return
        except TransportError as error:
            log.exception("tensors of %s from %s cannot be read", type(message).__name__, sender)
            self.unreadable(message, error)
            return
        self.try_dispatch(sender, message)

    def unreadable(self, message: Message, error: TransportError) -> None:
        """Fail the requests of a message whose tensors cannot be read, and return the tensors."""
        for handle in handles_of(message):
            self.executor.fail_handle(handle, error)
        for ref in refs_of(message):
            self.outbox.read(ref)

    def try_dispatch(self, sender: str, message: Message) -> None:
        """Dispatch one message. A bad message affects no other."""
        try:
            self.dispatch(message)
        except Exception:  # isolation boundary: one message
            log.exception("message %s of %s failed", type(message).__name__, sender)

    def take_arrivals(self, arrivals: Arrivals) -> int:
        """Dispatch the messages whose tensors have come. Returns their number."""
        count = 0
        for arrival in arrivals.take():
            count += 1
            if arrival.error is None:
                self.try_dispatch(arrival.sender, arrival.message)
            else:
                log.error("tensors from %s cannot be read: %s", arrival.sender, arrival.error)
                self.unreadable(arrival.message, arrival.error)
        return count

    @property
    def has_arrived(self) -> bool:
        """Whether a message has all its tensors."""
        return self.arrivals is not None and self.arrivals.has_ready

    def dispatch(self, message: Message) -> None:
        """Dispatch one message."""
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
            case EndSession():
                self.executor.end_session(message.session)
            case Reconcile():
                self.close_leftovers(message)
            case EndStream():
                self.executor.end_stream(message)
            case StreamItems():
                self.executor.stream_items(self.early.sift(message, self.executor.requests))
            case Values():
                for item in message.items:
                    if not self.early.keep(item.handle, Values(items=[item]), self.executor.requests):
                        self.executor.value(item, message.sent)
            case Playing():
                self.executor.playing(message)
            case StreamTensor():
                if not self.early.keep(message.handle, message, self.executor.requests):
                    self.executor.stream_tensor(message)
            case CacheMoved():
                if not self.early.keep(message.handle, message, self.executor.requests):
                    self.executor.cache_moved(message)
            case TensorFreed():
                for slot, generation in message.slots:
                    self.outbox.release(slot, generation)
            case PeerUp():
                if message.fd_endpoint:  # a follower exchanges no tensors with workers
                    blobs = self.life.blobs_of(message)
                    self.transport.connect(message.name, message.fd_endpoint, message.incarnation, blobs)
            case PeerDown():
                self.peer_down(message)
            case LoadAdapter():
                self.executor.adapters.begin(message)
            case UnloadAdapter():
                self.executor.adapters.unload(message, self.life.answer)
            case Sleep():
                self.let_sleep(message)
            case Wake():
                self.sleep.begin(message, lambda names: [])
            case ReleaseSignal():
                self.executor.release_signal(message)
            case PeerReady():
                pass  # of no use to a worker
            case _:
                log.warning("an unexpected %s was dropped", type(message).__name__)

    def let_sleep(self, message: Sleep) -> None:
        """Let nodes sleep unless requests use them. All nodes sleep only without any request."""

        def busy(names: frozenset[str]) -> list[int]:
            users = self.executor.users(names)
            if not users and not message.nodes:
                self.executor.features.clear()
            return list(users)

        self.sleep.begin(message, busy)

    def wake_wanted(self) -> None:
        """Report work of nodes that sleep, or fail it if requests wake none."""
        if self.wakes_on_request:
            self.sleep.want()
            return
        names = {name for name in self.sleep.asleep if self.runners[name].pressure().ready}
        if names:
            error = Unavailable(
                f"{', '.join(sorted(names))} sleeps", hint="wake the nodes that the request needs", code="sleeping"
            )
            self.executor.fail_waiting(names, error)

    def close_leftovers(self, message: Reconcile) -> None:
        """Close the requests that the conductor does not know any more, and drop tensors that wait for such ones."""
        for handle in self.leftovers.find(message, {*self.executor.requests, *self.early.handles}):
            log.warning("request %d is closed: the conductor does not know it any more", handle)
            self.early.closed(handle)
            self.executor.close(Handle(handle))

    def give_back(self) -> None:
        """Return the tensors that arrived for ended requests and were never read."""
        for ref in self.early.abandoned:
            self.outbox.read(ref)
        self.early.abandoned.clear()

    def peer_down(self, message: PeerDown) -> None:
        """Release everything of a peer. Without a conductor no request has an owner."""
        self.transport.reclaim(message.name, message.incarnation)
        if self.peer_memory is not None:
            self.peer_memory.reclaim(message.name, message.incarnation)
        if message.name == CONDUCTOR:
            for handle in list(self.executor.requests):
                self.early.closed(handle)
            self.executor.close_all()
            self.early.clear()
